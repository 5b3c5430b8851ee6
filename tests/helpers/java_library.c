// Stands in for the libraries of Android that onnxruntime's for Java was linked with: libc.so, libm.so and libdl.so with
// symbols of version LIBC, and its own libonnxruntime.so. Calls go to this machine's, which differ in name and version alone.

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#define LIBC(name) __attribute__((symver(#name "@LIBC")))

int __cxa_atexit(void (*)(void *), void *, void *);
void __cxa_finalize(void *);
int __register_atfork(void (*)(void), void (*)(void), void (*)(void), void *);

LIBC(malloc) void *own_malloc(size_t size) { return malloc(size); }
LIBC(realloc) void *own_realloc(void *held, size_t size) { return realloc(held, size); }
LIBC(free) void own_free(void *held) { free(held); }
LIBC(strlen) size_t own_strlen(const char *text) { return strlen(text); }
LIBC(memcpy) void *own_memcpy(void *to, const void *from, size_t size) { return memcpy(to, from, size); }
LIBC(dlclose) int own_dlclose(void *library) { return dlclose(library); }
LIBC(__stack_chk_fail) void own_stack_chk_fail(void) { abort(); }
LIBC(__cxa_finalize) void own_finalize(void *library) { __cxa_finalize(library); }
LIBC(__cxa_atexit) int own_atexit(void (*call)(void *), void *with, void *library) {
  return __cxa_atexit(call, with, library);
}
LIBC(__register_atfork)
int own_atfork(void (*before)(void), void (*parent)(void), void (*child)(void), void *library) {
  return __register_atfork(before, parent, child, library);
}

static void *real(const char *name) { return dlsym(dlopen("libonnxruntime.so.1", RTLD_NOW), name); }

const void *OrtGetApiBase(void) { return ((const void *(*)(void))real(__func__))(); }

void *OrtSessionOptionsAppendExecutionProvider_CPU(void *options, int arena) {
  return ((void *(*)(void *, int))real(__func__))(options, arena);
}

// Android's alone.
void *OrtSessionOptionsAppendExecutionProvider_Nnapi(void) { abort(); }
