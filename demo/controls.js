// Controls of actions: what is held in a round, sliders for a vector, buttons for the camera, a drag for the mouse.

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
const fraction = (number) => Math.min(1, Math.max(-1, number));

/** Passes actions on; where a round has several, samples what is held at the time of each and passes on a list. */
export class ActionSampler {
  held = new Map(); // the key or pointer that holds it → { action, name, sampled, released }
  actions = [];
  names = new Set();
  frames = 0; // since something is held
  waiting = false; // for the first frame after a list

  constructor({ action, chunk_frames: frames, fps, pace }, act) {
    this.count = action.per_round;
    this.stride = frames / this.count;
    this.interval = (1000 * this.stride) / fps;
    this.dense = pace === "on_action"; // the model was trained with an action at all times
    this.act = act;
  }

  /** Take an action that lasts until its source is released; without a source, for one sample. */
  take(action, name, source = Symbol(name)) {
    if (this.count === 1) return this.act(action, name);
    this.held.set(source, { action, name, sampled: false, released: typeof source === "symbol" });
  }

  release(source) {
    const control = this.held.get(source);
    if (control?.sampled) this.held.delete(source);
    else if (control) control.released = true; // it was shorter than a sample, and counts for one
  }

  releaseAll() {
    for (const source of [...this.held.keys()]) this.release(source);
  }

  /** Whether time has to go on although no frame is shown, for a list that the world waits for. */
  get due() {
    return !this.waiting && (this.held.size > 0 || this.actions.length > 0);
  }

  /** Go on by the time of a frame. */
  frame() {
    if (!this.held.size && !this.actions.length) this.frames = 0;
    else if (this.frames++ % this.stride === 0) this.sample();
  }

  sample() {
    const controls = [...this.held];
    if (!this.actions.length) this.since = performance.now();
    const none = this.dense ? this.actions.at(-1) : {};
    this.actions.push(controls.length ? merged(controls.map(([, { action }]) => action)) : none);
    for (const [source, entry] of controls) {
      this.names.add(entry.name);
      entry.sampled = true;
      if (entry.released) this.held.delete(source);
    }
    if (this.actions.length < this.count) return;
    this.waiting = true;
    this.act({ chunk: this.actions }, [...this.names].join(", "), this.since);
    this.actions = [];
    this.names.clear();
  }

  clear() {
    this.held.clear();
    this.actions = [];
    this.names.clear();
    this.waiting = false;
  }
}

/** Return one action with all keys, the sum of mouse motions, and the newest of other parts. */
function merged(actions) {
  const action = Object.assign({}, ...actions);
  if (action.keys) action.keys = [...new Set(actions.flatMap(({ keys = [] }) => keys))];
  if (action.mouse) {
    action.mouse = [0, 1].map((axis) => fraction(actions.reduce((sum, { mouse }) => sum + (mouse?.[axis] ?? 0), 0)));
  }
  return action;
}

/** Call `use` for a click; where a round has several actions, with the pointer that holds the button. */
export function onPress(button, sampler, use) {
  button.addEventListener("pointerdown", (event) => {
    if (sampler.count > 1 && !event.button) use(event.pointerId);
  });
  button.addEventListener("click", (event) => {
    if (sampler.count === 1 || !event.detail) use(); // a click by the keyboard has no pointer
  });
}

export function showSliders(place, schema, sampler) {
  const { vector_size: size, vector_names: names, vector_low: low, vector_high: high } = schema;
  place.hidden = !size;
  const sliders = Array.from({ length: size }, (_, index) => {
    const [min, max] = [low[index] ?? -1, high[index] ?? 1];
    const input = control("input", { type: "range", min, max, step: (max - min) / 40 });
    input.value = Math.min(Math.max(0, min), max);
    const shown = control("output", { textContent: input.value });
    input.addEventListener("input", () => {
      shown.textContent = input.value;
      if (sampler.count > 1) use(place);
    });
    input.addEventListener("change", () => sampler.release(place));
    const label = document.createElement("label");
    label.append(names[index] ?? String(index + 1), input, shown);
    return label;
  });
  const go = control("button", { type: "button", textContent: "Send numbers" });
  const use = (source) => {
    const vector = sliders.map((label) => Number(label.control.value));
    sampler.take({ vector }, vector.join(", "), source);
  };
  onPress(go, sampler, use);
  place.replaceChildren(...sliders, go);
}

/** Motions during a round, relative to the camera; its axes: x right, y up, z forward. */
export function showCamera(place, { camera }, sampler) {
  place.hidden = !camera;
  const caption = control("span", { className: "quiet", textContent: "Camera" });
  place.replaceChildren(caption, ...MOTIONS.map(({ name, sign, x = 0, z = 0, turn = 0 }) => {
    const button = control("button", { type: "button", textContent: sign, title: name });
    button.setAttribute("aria-label", name);
    const data = { translation: [x, 0, z], rotation: [0, Math.sin(turn / 2), 0, Math.cos(turn / 2)] };
    onPress(button, sampler, (source) => sampler.take({ camera: { mode: "velocity", data } }, name, source));
    return button;
  }));
}

/** Dragging moves the mouse by as much of the picture; a long drag is one for the time of every action. */
export function lookByDragging(picture, { mouse }, sampler) {
  picture.toggleAttribute("data-look", mouse);
  let drag = null;
  const send = (event) => {
    const { width, height } = picture.getBoundingClientRect();
    const way = [(event.clientX - drag.x) / width, (event.clientY - drag.y) / height];
    if (!way.some(Boolean)) return;
    const moved = way.map((each) => Number(fraction(each).toFixed(3)));
    sampler.take({ mouse: moved }, `mouse ${moved.join(", ")}`);
    drag = { x: event.clientX, y: event.clientY, at: event.timeStamp };
  };
  picture.onpointerdown = (event) => {
    if (!mouse || event.button) return;
    picture.setPointerCapture(event.pointerId);
    drag = { x: event.clientX, y: event.clientY, at: event.timeStamp };
  };
  picture.onpointermove = (event) => {
    if (drag && event.timeStamp - drag.at >= sampler.interval) send(event);
  };
  picture.onpointerup = (event) => {
    if (drag) send(event);
    drag = null;
  };
  picture.onpointercancel = () => (drag = null);
}
