// Buttons that let a world play in place of the picture above them, where the site has the world (`make web`).

for (const button of document.querySelectorAll("[data-play]")) {
  const world = new URL(button.dataset.play, document.baseURI);
  fetch(new URL("web.json", world), { method: "HEAD" })
    .then(({ ok }) => (button.hidden = !ok))
    .catch(() => {}); // a site on a disk
  button.addEventListener("click", () => {
    const frame = Object.assign(document.createElement("iframe"), { src: world.href, title: button.textContent });
    button.closest(".wm-play").querySelector("img, iframe").replaceWith(frame);
  });
}
