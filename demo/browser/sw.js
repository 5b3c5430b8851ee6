// Keeps what was loaded once, so that the page works without its server, and says that the page shares memory with nobody:
// only then do browsers let wasm have threads. Servers may send these headers themselves; static ones cannot.

const CACHE = "training-in-this-page";

self.addEventListener("install", () => self.skipWaiting());
self.addEventListener("activate", (event) => event.waitUntil(self.clients.claim()));

self.addEventListener("fetch", (event) => {
  const { request } = event;
  if (request.method === "GET" && request.url.startsWith(self.location.origin)) event.respondWith(answer(request));
});

/** From the server, else from what was kept. */
async function answer(request) {
  const cache = await caches.open(CACHE);
  try {
    const found = await fetch(request, { cache: "no-cache" });
    if (found.status === 200) await cache.put(request, found.clone());
    return isolated(found);
  } catch (error) {
    const kept = await cache.match(request, { ignoreSearch: request.mode === "navigate" });
    if (!kept) throw error;
    return isolated(kept);
  }
}

function isolated(answer) {
  const headers = new Headers(answer.headers);
  headers.set("Cross-Origin-Opener-Policy", "same-origin");
  headers.set("Cross-Origin-Embedder-Policy", "require-corp");
  headers.set("Cross-Origin-Resource-Policy", "same-origin");
  return new Response(answer.body, { status: answer.status, statusText: answer.statusText, headers });
}
