// A service worker that adds the two headers with which browsers let threads share memory, since static hosting seldom
// sends them. It changes nothing else and keeps nothing.

const ISOLATED = { "Cross-Origin-Opener-Policy": "same-origin", "Cross-Origin-Embedder-Policy": "require-corp" };

self.addEventListener("fetch", (event) => {
  if (new URL(event.request.url).origin !== location.origin) return;
  event.respondWith(fetch(event.request).then((response) => {
    const { status, statusText } = response;
    if (status === 0 || status === 304) return response;
    const headers = new Headers(response.headers);
    for (const [name, value] of Object.entries(ISOLATED)) headers.set(name, value);
    return new Response([204, 205].includes(status) ? null : response.body, { status, statusText, headers });
  }));
});
