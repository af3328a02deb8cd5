// Controls of actions that are numbers: sliders for a vector, buttons for the camera, a drag for the mouse.

const STEP = 0.1; // of the camera, in the units of the world
const TURN = (10 * Math.PI) / 180;
const MOTIONS = [
  { name: "turn left", sign: "↶", turn: -TURN },
  { name: "forward", sign: "↑", z: STEP },
  { name: "turn right", sign: "↷", turn: TURN },
  { name: "left", sign: "←", x: -STEP },
  { name: "backward", sign: "↓", z: -STEP },
  { name: "right", sign: "→", x: STEP },
];

const control = (tag, fields) => Object.assign(document.createElement(tag), fields);

export function showSliders(place, { vector_size: size, vector_names: names, vector_low: low, vector_high: high }, act) {
  place.hidden = !size;
  const sliders = Array.from({ length: size }, (_, index) => {
    const [min, max] = [low[index] ?? -1, high[index] ?? 1];
    const input = control("input", { type: "range", min, max, step: (max - min) / 40 });
    input.value = Math.min(Math.max(0, min), max);
    const shown = control("output", { textContent: input.value });
    input.addEventListener("input", () => (shown.textContent = input.value));
    const label = document.createElement("label");
    label.append(names[index] ?? String(index + 1), input, shown);
    return label;
  });
  const go = control("button", { type: "button", textContent: "Send numbers" });
  go.addEventListener("click", () => {
    const vector = [...place.querySelectorAll("input")].map((input) => Number(input.value));
    act({ vector }, vector.join(", "));
  });
  place.replaceChildren(...sliders, go);
}

/** Motions during a round, relative to the camera; its axes: x right, y up, z forward. */
export function showCamera(place, { camera }, act) {
  place.hidden = !camera;
  const caption = control("span", { className: "quiet", textContent: "Camera" });
  place.replaceChildren(caption, ...MOTIONS.map(({ name, sign, x = 0, z = 0, turn = 0 }) => {
    const button = control("button", { type: "button", textContent: sign, title: name });
    button.setAttribute("aria-label", name);
    const data = { translation: [x, 0, z], rotation: [0, Math.sin(turn / 2), 0, Math.cos(turn / 2)] };
    button.addEventListener("click", () => act({ camera: { mode: "velocity", data } }, name));
    return button;
  }));
}

/** Dragging moves the mouse by as much of the picture; a long drag is an action for every `interval` ms. */
export function lookByDragging(picture, { mouse }, interval, act) {
  picture.toggleAttribute("data-look", mouse);
  let drag = null;
  const send = (event) => {
    const { width, height } = picture.getBoundingClientRect();
    const way = [(event.clientX - drag.x) / width, (event.clientY - drag.y) / height];
    if (!way.some(Boolean)) return;
    const moved = way.map((each) => Number(Math.min(1, Math.max(-1, each)).toFixed(3)));
    act({ mouse: moved }, `mouse ${moved.join(", ")}`);
    drag = { x: event.clientX, y: event.clientY, at: event.timeStamp };
  };
  picture.onpointerdown = (event) => {
    if (!mouse || event.button) return;
    picture.setPointerCapture(event.pointerId);
    drag = { x: event.clientX, y: event.clientY, at: event.timeStamp };
  };
  picture.onpointermove = (event) => {
    if (drag && event.timeStamp - drag.at >= interval) send(event);
  };
  picture.onpointerup = (event) => {
    if (drag) send(event);
    drag = null;
  };
  picture.onpointercancel = () => (drag = null);
}
