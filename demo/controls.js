// Controls of actions, one for each widget that a world names: what is held in a round, keys, sliders, buttons, a drag.
// A page has an empty element `act`, which is filled when this module is loaded.

const ARROWS = { ArrowLeft: ["left"], ArrowRight: ["right"], ArrowUp: ["up", "forward"], ArrowDown: ["down", "backward"] };
const PAD_BUTTONS = { ArrowUp: 12, ArrowDown: 13, ArrowLeft: 14, ArrowRight: 15 }; // of the standard gamepad
const STICK = 0.5; // how far a stick is moved for a direction
const KEPT_LOG = 6; // newest actions that are listed
const FORM = `
  <h2>Act</h2>
  <p id="hint" class="quiet"></p>
  <div id="things" class="chips" role="radiogroup" aria-label="Object" hidden></div>
  <div class="hands">
    <div id="pad" class="pad" role="group" aria-label="Directions" hidden></div>
    <div id="buttons" hidden></div>
    <div id="verbs" class="chips" role="group" aria-label="Actions" hidden></div>
  </div>
  <div id="numbers" role="group" aria-label="Numbers" hidden></div>
  <form id="say" hidden>
    <label for="words">Describe an action</label>
    <div class="row">
      <input id="words" maxlength="1000" autocomplete="off" placeholder="the red ball jumps">
      <button type="submit">Send</button>
    </div>
  </form>
  <h3 id="log-title">Actions</h3>
  <ol id="log" aria-labelledby="log-title"></ol>`;
const SIGNS = { left: "←", right: "→", up: "↑", forward: "↑", down: "↓", backward: "↓" };

const $ = (id) => document.getElementById(id);
const control = (tag, fields) => Object.assign(document.createElement(tag), fields);
$("act").innerHTML = FORM;
const fraction = (number) => Math.min(1, Math.max(-1, number));

/** Passes actions on; where a round has several, samples what is held at the time of each and passes on a list. */
export class ActionSampler {
  held = new Map(); // the key or pointer that holds it → { action, name, sampled, released }
  actions = [];
  names = new Set();
  frames = 0; // since something is held
  waiting = false; // for the first frame after a list

  constructor({ action, chunk_frames: frames, fps, pace }, act) {
    this.merges = Object.entries(action.widgets).map(([kind, { merge }]) => [kind, merge]);
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
    this.actions.push(controls.length ? this.merged(controls.map(([, { action }]) => action)) : none);
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

  /** Return one action of several: of each kind the newest value, the union of lists, or the sum of fractions. */
  merged(actions) {
    const action = Object.assign({}, ...actions);
    for (const [kind, merge] of this.merges) {
      const values = actions.map((each) => each[kind]).filter((value) => value !== undefined);
      if (!values.length) continue;
      if (merge === "union") action[kind] = [...new Set(values.flat())];
      if (merge === "sum") action[kind] = values[0].map((_, axis) => fraction(values.reduce((sum, value) => sum + value[axis], 0)));
    }
    return action;
  }

  clear() {
    this.held.clear();
    this.actions = [];
    this.names.clear();
    this.waiting = false;
  }
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

/** Return the widgets of a type, as pairs of the kind of action and the widget. */
export const widgets = (schema, type) => Object.entries(schema.widgets).filter(([, widget]) => widget.type === type);

/** Sliders for lists of numbers, and a button that sends them. */
export function showSliders(place, schema, sampler) {
  const groups = widgets(schema, "sliders").map(([kind, widget]) => {
    const group = control("div", { className: "sliders" });
    const sliders = widget.sliders.map(({ name, low: min, high: max }) => {
      const input = control("input", { type: "range", min, max, step: (max - min) / 40 });
      input.value = Math.min(Math.max(0, min), max);
      const shown = control("output", { textContent: input.value });
      input.addEventListener("input", () => {
        shown.textContent = input.value;
        if (sampler.count > 1) use(group);
      });
      input.addEventListener("change", () => sampler.release(group));
      const label = document.createElement("label");
      label.append(name, input, shown);
      return label;
    });
    const go = control("button", { type: "button", textContent: "Send numbers" });
    const use = (source) => {
      const numbers = sliders.map((label) => Number(label.control.value));
      sampler.take({ [kind]: numbers }, numbers.join(", "), source);
    };
    onPress(go, sampler, use);
    group.append(...sliders, go);
    return group;
  });
  place.hidden = !groups.length;
  place.replaceChildren(...groups);
}

/** Buttons that each send a value, such as a motion of the camera. */
export function showButtons(place, schema, sampler) {
  const groups = widgets(schema, "buttons").map(([kind, widget]) => {
    const group = control("div", { className: "pad", role: "group", ariaLabel: kind });
    const caption = control("span", { className: "quiet", textContent: kind[0].toUpperCase() + kind.slice(1) });
    group.append(caption, ...widget.buttons.map(({ name, sign, value }) => {
      const button = control("button", { type: "button", textContent: sign, title: name });
      button.setAttribute("aria-label", name);
      onPress(button, sampler, (source) => sampler.take({ [kind]: value }, name, source));
      return button;
    }));
    return group;
  });
  place.hidden = !groups.length;
  place.replaceChildren(...groups);
}

/**
 * Dragging sends as much motion of the picture, for some models after the place where it began; a long drag is one
 * for the time of every action.
 */
export function lookByDragging(picture, schema, sampler) {
  const [kind, widget] = widgets(schema, "drag")[0] ?? [];
  picture.toggleAttribute("data-look", Boolean(kind));
  let drag = null;
  const send = (event) => {
    const { left, top, width, height } = picture.getBoundingClientRect();
    const way = [(event.clientX - drag.x) / width, (event.clientY - drag.y) / height];
    if (!way.some(Boolean)) return;
    const place = widget.pressed ? [(drag.x - left) / width, (drag.y - top) / height] : [];
    const moved = [...place.map((each) => Math.max(0, each)), ...way].map((each) => Number(fraction(each).toFixed(3)));
    sampler.take({ [kind]: moved }, `${kind} ${moved.join(", ")}`);
    drag = { x: event.clientX, y: event.clientY, at: event.timeStamp };
  };
  picture.onpointerdown = (event) => {
    if (!kind || event.button) return;
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

/** Whether a press of a key is neither for a field nor for the browser. */
export const isFree = (event) =>
  !(event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, textarea, select"));

/** Whether a press of a key takes the last round back. */
export const undoes = (event) => event.key === "Backspace" && isFree(event);

/** All controls of a world. */
export class Controls {
  /**
   * @param {object} world what a server or web.json says: action, chunk_frames, fps, pace
   * @param {function} act takes an action and its name
   * @param {Element} picture on which one drags
   * @param {?string} thing the colour that actions were about before
   */
  constructor(world, act, picture, thing = null) {
    const schema = world.action;
    const [[kind, { names: keys }]] = [...widgets(schema, "keys"), ["keys", { names: [] }]];
    const [drags, says] = ["drag", "text"].map((type) => widgets(schema, type)[0]?.[1]);
    this.kind = kind; // of action, that the buttons are
    this.sampler = new ActionSampler(world, act);
    const things = keys.filter((key) => CSS.supports("color", key));
    const moves = keys.filter((key) => key in SIGNS);
    const verbs = keys.filter((key) => !things.includes(key) && !moves.includes(key));
    const shortcuts = letters(verbs);
    this.verbs = verbs;
    this.onPads = new Set(); // what gamepads hold
    this.shortcuts = new Map([
      ...things.slice(0, 9).map((key, index) => [String(index + 1), () => this.choose(key)]),
      ...Object.entries(ARROWS).flatMap(([arrow, names]) =>
        names.filter((key) => moves.includes(key)).slice(0, 1).map((key) => [arrow, (source) => this.press(key, source)])),
      ...verbs.filter((key) => shortcuts.has(key)).map((key) => [shortcuts.get(key), (source) => this.press(key, source)]),
    ]);
    $("things").replaceChildren(...things.map((key, index) => {
      const button = this.chip(key, index < 9 ? String(index + 1) : "", () => this.choose(key));
      button.setAttribute("role", "radio");
      const swatch = control("span", { className: "swatch" });
      swatch.style.backgroundColor = key;
      button.prepend(swatch);
      return button;
    }));
    $("pad").replaceChildren(...moves.map((key) => this.chip(key, "", (source) => this.press(key, source))));
    $("verbs").replaceChildren(
      ...verbs.map((key) => this.chip(key, shortcuts.get(key), (source) => this.press(key, source))));
    $("things").hidden = !things.length;
    $("pad").hidden = !moves.length;
    $("verbs").hidden = !verbs.length;
    $("say").hidden = !says;
    $("say").onsubmit = (event) => {
      event.preventDefault();
      const text = $("words").value.trim();
      if (text) act({ text }, text);
      $("words").value = "";
    };
    showSliders($("numbers"), schema, this.sampler);
    showButtons($("buttons"), schema, this.sampler);
    lookByDragging(picture, schema, this.sampler);
    this.thing = null;
    if (things.length) this.choose(things.includes(thing) ? thing : things[0]);
    $("hint").textContent = hint(things, moves, drags, says);
  }

  chip(key, shortcut, use) {
    const button = control("button", { type: "button" });
    button.dataset.key = key;
    button.append(key in SIGNS ? SIGNS[key] : key);
    if (key in SIGNS) button.setAttribute("aria-label", key);
    else if (shortcut) button.append(" ", control("kbd", { textContent: shortcut }));
    onPress(button, this.sampler, use);
    return button;
  }

  press(key, source) {
    const keys = this.thing ? [this.thing, key] : [key];
    const button = document.querySelector(`#act [data-key="${CSS.escape(key)}"]`);
    button?.classList.add("lit");
    setTimeout(() => button?.classList.remove("lit"), 150);
    this.sampler.take({ [this.kind]: keys }, keys.join(" "), source);
  }

  /** Take what gamepads hold: directions, also of the left stick, and buttons, which are the verbs in their order. */
  gamepads(pads) {
    const held = new Map();
    for (const pad of pads) {
      if (!pad?.connected) continue;
      const [x = 0, y = 0] = pad.axes;
      const tilted = { ArrowUp: y < -STICK, ArrowDown: y > STICK, ArrowLeft: x < -STICK, ArrowRight: x > STICK };
      for (const [arrow, index] of Object.entries(PAD_BUTTONS)) {
        if (tilted[arrow] || pad.buttons[index]?.pressed) held.set(`pad ${arrow}`, this.shortcuts.get(arrow));
      }
      this.verbs.slice(0, PAD_BUTTONS.ArrowUp).forEach((verb, index) => {
        if (pad.buttons[index]?.pressed) held.set(`pad ${index}`, (source) => this.press(verb, source));
      });
    }
    for (const source of this.onPads) if (!held.has(source)) this.sampler.release(source);
    for (const [source, use] of held) if (!this.onPads.has(source)) use?.(source);
    this.onPads = new Set(held.keys());
  }

  choose(thing) {
    this.thing = thing;
    for (const chip of $("things").children) {
      const chosen = chip.dataset.key === thing;
      chip.setAttribute("aria-checked", chosen);
      chip.tabIndex = chosen ? 0 : -1;
    }
  }

  /** Offer only the things that a description names; all of them if it names none. */
  present(text) {
    const words = new Set(text.toLowerCase().match(/[a-z]+/g));
    const chips = [...$("things").children];
    const there = chips.filter((chip) => words.has(chip.dataset.key));
    for (const chip of chips) chip.hidden = there.length > 0 && !there.includes(chip);
    if (there.length && !there.some((chip) => chip.dataset.key === this.thing)) this.choose(there[0].dataset.key);
  }

  /** Take a key of the keyboard, if it is a shortcut; letters in fields and browser shortcuts are not. */
  pressed(event) {
    if (!isFree(event)) return;
    const use = this.shortcuts.get(event.key.length === 1 ? event.key.toLowerCase() : event.key);
    if (!use) return;
    event.preventDefault(); // or the arrows would scroll
    if (!event.repeat) use(event.code);
  }
}

/** List an action with what becomes of it; returns the element whose text says that. */
export function listed(name, state) {
  const item = document.createElement("li");
  item.append(...[name, state].map((text) => control("span", { textContent: text })));
  $("log").prepend(item);
  while ($("log").children.length > KEPT_LOG) $("log").lastElementChild.remove();
  return item.lastElementChild;
}

/** Show the moments that were kept, each as a button to return to it. */
export function showMoments(moments, here, goTo) {
  $("moments").hidden = !moments.length;
  $("moments").replaceChildren(...moments.map((moment) => {
    const button = control("button", { type: "button", textContent: `Round ${moment.round}` });
    button.setAttribute("aria-pressed", moment === here);
    button.addEventListener("click", () => goTo(moment));
    return button;
  }));
}

/** Let go of what keys and pointers hold, when they are let go of. */
export function onRelease(controls) {
  document.addEventListener("keyup", ({ code }) => controls()?.sampler.release(code));
  document.addEventListener("pointerup", ({ pointerId }) => controls()?.sampler.release(pointerId));
  document.addEventListener("pointercancel", ({ pointerId }) => controls()?.sampler.release(pointerId));
  window.addEventListener("blur", () => controls()?.sampler.releaseAll());
}

function hint(things, moves, drags, says) {
  const parts = [];
  if (things.length) parts.push("Choose an object by its colour, then an action.");
  const touched = matchMedia("(hover: none) and (pointer: coarse)").matches;
  if (moves.length) parts.push(touched ? "The arrows move." : "Arrow keys move.");
  if (drags) parts.push(drags.pressed ? "Drag an object of the picture to take it along." : "Drag on the picture to look around.");
  if (says) parts.push(parts.length ? "Or describe an action in text." : "Describe an action in text.");
  return parts.join(" ");
}

/** Give each verb a letter of its own: its first one that is free. */
function letters(verbs) {
  const given = new Map();
  const taken = new Set();
  for (const verb of verbs) {
    const letter = [...verb.toLowerCase()].find((each) => /[a-z]/.test(each) && !taken.has(each));
    if (letter) given.set(verb, letter);
    taken.add(letter);
  }
  return given;
}
