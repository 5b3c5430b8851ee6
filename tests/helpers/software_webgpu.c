// Stands in for Chromium's libvk_swiftshader.so: the system's Vulkan loader, whose devices say that they are SwiftShader.
// Chromium takes no other device that computes on the processor, and SwiftShader has no 16-bit arithmetic; Mesa's has.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <string.h>

typedef void (*function)(void);
typedef struct { uint32_t api, driver, vendor, device, type; } properties; // how VkPhysicalDeviceProperties begins
typedef struct { int type; void *next; properties of; } properties2;

static function (*loader)(void *, const char *);
static void (*get)(void *, properties *);
static void (*get2)(void *, properties2 *);

static void named(properties *of) {
  of->vendor = 0x1AE0;
  of->device = 0xC0DE;
}

static void named_get(void *device, properties *of) {
  get(device, of);
  named(of);
}

static void named_get2(void *device, properties2 *of) {
  get2(device, of);
  named(&of->of);
}

function vkGetInstanceProcAddr(void *instance, const char *name) {
  if (!loader) loader = (function(*)(void *, const char *))dlsym(dlopen("libvulkan.so.1", RTLD_NOW), "vkGetInstanceProcAddr");
  function found = loader(instance, name);
  if (!strcmp(name, "vkGetInstanceProcAddr")) return (function)vkGetInstanceProcAddr;
  if (found && !strcmp(name, "vkGetPhysicalDeviceProperties")) {
    get = (void (*)(void *, properties *))found;
    return (function)named_get;
  }
  if (found && !strncmp(name, "vkGetPhysicalDeviceProperties2", 30)) {
    get2 = (void (*)(void *, properties2 *))found;
    return (function)named_get2;
  }
  return found;
}
