// A world on a page without a server: a worker plays the rounds (worker.js), and the page shows and remembers them.

import * as assets from "./assets.js";

const $ = (id) => document.getElementById(id);
const LEAST_SIDE = 256; // of saved pictures
const WARM_ROUNDS = 4;
const MAX_AHEAD_ROUNDS = 1; // rounds that are made before their frames can be shown
const UNKNOWN = "This world does not know that picture, and will make something else of it.";
const LIVE = ["fork", "run", "wait", "gif", "png", "share", "again", "stop"]; // what one can do in a world
const OVER = "The episode ends here. Undo, or start again.";
const MAX_THREADS = 4;
const MAX_WAITING = 4; // actions that wait for a round
// A module with one SIMD instruction, which the runtime needs.
const SIMD = Uint8Array.of(0, 97, 115, 109, 1, 0, 0, 0, 1, 5, 1, 96, 0, 1, 123, 3, 2, 1, 0, 10, 10, 1, 8, 0, 65, 0, 253, 15, 253, 98, 11);

const game = {
  meta: null,
  controls: null,
  listed: null, // of controls.js, as showMoments and undoes
  showMoments: null,
  moment: null, // that is shown
  start: null, // an index, { text } or { png }
  seed: 0,
  waiting: [], // { action, name, done }
  busy: false,
  running: false,
  kept: [], // moments that were forked
  starts: [], // { title, rgba }
};

// ---- the worker -------------------------------------------------------------------------------------------

const player = {
  asked: new Map(),
  last: 0,

  async open() {
    this.worker = await assets.worker("worker.js");
    this.worker.onmessage = ({ data: { id, value, error, refused } }) => {
      const { resolve, reject } = this.asked.get(id);
      this.asked.delete(id);
      if (error === undefined) resolve(value);
      else reject(Object.assign(new Error(error), { refused }));
    };
    this.worker.onerror = ({ message }) => complain(`The world stopped: ${message}. Load the page again.`);
  },

  ask(call, args, moved = []) {
    const id = ++this.last;
    return new Promise((resolve, reject) => {
      this.asked.set(id, { resolve, reject });
      this.worker.postMessage({ id, call, args }, moved);
    });
  },
};

async function load() {
  document.body.toggleAttribute("data-embedded", window.parent !== window);
  if (!globalThis.WebAssembly || !WebAssembly.validate(SIMD)) {
    throw new Error("This browser has no WebAssembly with SIMD; use a newer version of it, or another one.");
  }
  const meta = JSON.parse(new TextDecoder().decode(await assets.bytes("web.json")));
  Object.assign(game, { meta });
  document.title = `${meta.name} – play a world`;
  $("model").textContent = `${meta.name} · ${meta.size.toReversed().join(" x ")} px · ${meta.fps} frames a second`;
  $("about").textContent = meta.about;
  const { Controls, listed, onRelease, showMoments, undoes } = await import(await assets.module("controls.js"));
  Object.assign(game, { listed, showMoments, undoes });
  const world = { action: meta.action, chunk_frames: meta.chunk_frames, fps: meta.fps, pace: "on_action" };
  game.controls = new Controls(world, act, $("screen"));
  onRelease(() => game.controls);
  game.ready = prepare(meta);
  isolate();
  game.ready.catch(() => {}); // it is awaited below
  await offer(); // one can choose while the graphs are loaded
  await game.ready;
  $("loading").hidden = true;
  if (!game.moment) pill("Choose a start", "open");
  if (location.hash.length > 1) await replay(location.hash.slice(1)).catch((error) => complain(error.message));
}

/** Load graphs, runtime and tokenizer, and start the worker. */
async function prepare(meta) {
  const names = { encode: "encode.onnx", round: "round.onnx", decode: "decode.onnx", wasm: "runtime/ort.wasm" };
  if (meta.action.kinds.text) Object.assign(names, { tokenizer: "tokenizer.json", tokenizer_config: "tokenizer_config.json" });
  const total = Object.values(names).reduce((sum, name) => sum + meta.files[name], 0);
  let seen = 0;
  const progress = (count) => ($("loading").value = (seen += count) / total);
  const loaded = Object.entries(names).map(async ([key, name]) => [key, await assets.bytes(name, meta.files[name], progress)]);
  await player.open();
  const files = Object.fromEntries(await Promise.all(loaded));
  const modules = {
    ort: await assets.module("runtime/ort.mjs"),
    world: await assets.module("world.js"),
    tokenizers: await assets.module("runtime/tokenizers.mjs"),
  };
  // Threads share memory, which browsers allow by two headers only.
  const threads = globalThis.crossOriginIsolated ? Math.min(MAX_THREADS, navigator.hardwareConcurrency) : 1;
  await player.ask("load", { modules, files, meta, threads }, Object.values(files).map(({ buffer }) => buffer));
}

/** Have the next visit isolated, so that it may use threads; loading the page again would delay this one. */
function isolate() {
  if (globalThis.crossOriginIsolated || window.parent !== window || !location.protocol.startsWith("http")) return;
  navigator.serviceWorker?.register("isolate.js").catch(() => {}); // then it stays at one thread
}

/** Show the pictures to start from. */
async function offer() {
  for (const { title, file } of game.meta.starts) {
    const png = new Blob([await assets.bytes(file)], { type: "image/png" });
    game.starts.push({ title, rgba: await pixels(png) });
  }
  $("tiles").hidden = !game.starts.length;
  $("tiles").replaceChildren(...game.starts.map(({ title, rgba }, index) => {
    const button = Object.assign(document.createElement("button"), { type: "button", title });
    button.append(Object.assign(document.createElement("img"), { src: drawn(rgba, 1).toDataURL(), alt: title }));
    button.addEventListener("click", () => begin(index));
    return button;
  }));
  $("veil-text").textContent = "Choose a start.";
  $("imagine").hidden = !game.meta.blank;
  $("wait").hidden = $("run").hidden = game.meta.pace === "on_action"; // then every round has an action
}

// ---- pictures ---------------------------------------------------------------------------------------------

/** Return the RGBA of a picture, cropped to the world's shape from its middle and scaled to its size. */
async function pixels(blob) {
  let bitmap;
  try {
    bitmap = await createImageBitmap(blob);
  } catch {
    throw new Error("That file is no picture that this browser reads; choose a PNG, JPEG or WebP.");
  }
  const [height, width] = game.meta.size;
  const scale = Math.max(width / bitmap.width, height / bitmap.height);
  const [w, h] = [width / scale, height / scale];
  const canvas = Object.assign(document.createElement("canvas"), { width, height });
  const context = canvas.getContext("2d", { willReadFrequently: true });
  context.fillStyle = "white"; // behind what is transparent
  context.fillRect(0, 0, width, height);
  context.imageSmoothingEnabled = scale !== 1;
  context.imageSmoothingQuality = "high";
  context.drawImage(bitmap, (bitmap.width - w) / 2, (bitmap.height - h) / 2, w, h, 0, 0, width, height);
  bitmap.close();
  return new Uint8Array(context.getImageData(0, 0, width, height).data.buffer);
}

/** Return a canvas with a frame, enlarged by a whole factor. */
function drawn(rgba, factor) {
  const [height, width] = game.meta.size;
  const small = Object.assign(document.createElement("canvas"), { width, height });
  small.getContext("2d").putImageData(new ImageData(new Uint8ClampedArray(rgba), width, height), 0, 0);
  if (factor === 1) return small;
  const large = Object.assign(document.createElement("canvas"), { width: width * factor, height: height * factor });
  const context = large.getContext("2d");
  context.imageSmoothingEnabled = false;
  context.drawImage(small, 0, 0, large.width, large.height);
  return large;
}

const factor = () => Math.max(1, Math.round(LEAST_SIDE / Math.min(...game.meta.size)));

const screen = {
  frames: [], // { rgba, shown: called when it is }
  nextAt: 0,

  add(moment) {
    const size = game.meta.size[0] * game.meta.size[1] * 4;
    for (let at = 0; at < moment.frames.length; at += size) {
      const last = at + size === moment.frames.length;
      this.frames.push({ rgba: moment.frames.subarray(at, at + size), shown: last ? () => arrived(moment) : null });
    }
  },

  /** Rounds whose frames are still to be shown. */
  get ahead() {
    return this.frames.length / game.meta.chunk_frames;
  },

  tick(now) {
    if (game.moment) game.controls?.gamepads(navigator.getGamepads?.() ?? []);
    if (this.frames.length && now >= this.nextAt) {
      const { rgba, shown } = this.frames.shift();
      this.show(rgba);
      shown?.();
      // A late frame resets the schedule; frames on time keep it without drift.
      this.nextAt = (now - this.nextAt > 2000 / game.meta.fps ? now : this.nextAt) + 1000 / game.meta.fps;
    }
    game.controls?.sampler.frame();
    requestAnimationFrame((then) => this.tick(then));
  },

  show(rgba) {
    const [height, width] = game.meta.size;
    const canvas = $("screen");
    if (canvas.width !== width || canvas.height !== height) Object.assign(canvas, { width, height });
    canvas.getContext("2d").putImageData(new ImageData(new Uint8ClampedArray(rgba), width, height), 0, 0);
  },

  /** Show a moment at once, in place of what was still to be shown. */
  jump(moment) {
    const size = game.meta.size[0] * game.meta.size[1] * 4;
    this.frames = [];
    this.show(moment.frames.subarray(moment.frames.length - size));
    arrived(moment);
  },
};

// ---- moments: a tree whose branches never change -------------------------------------------------------------

/** Start from a picture of the list (an index), an uploaded one ({ png }) or a text ({ text }). */
async function begin(start, seed = Number($("seed").value) || 0) {
  complain("");
  pill("Starting…", "live");
  try {
    if (game.starts[start]) screen.show(game.starts[start].rgba);
    await game.ready;
    const made = await first(start, seed);
    Object.assign(game, { start, seed, waiting: [], kept: [], running: false, moment: { ...made, parent: null, action: null, round: 0 } });
  } catch (error) {
    pill("Choose a start", "open");
    complain(error.message);
    return;
  }
  game.controls.sampler.clear();
  $("log").replaceChildren();
  $("seed").value = seed;
  document.body.dataset.live = "";
  $("start").hidden = $("veil").hidden = true;
  $("act").hidden = false;
  for (const name of LIVE) $(name).disabled = false;
  screen.nextAt = 0;
  if (game.meta.chunk_frames > 1 && start?.text) screen.add(game.moment);
  else screen.jump(game.moment);
  warm(game.moment);
}

async function first(start, seed) {
  if (start?.text !== undefined) return player.ask("imagine", { text: start.text, seed });
  // A link can say what it likes: nothing is fetched for it.
  const rgba = String(start?.png).startsWith("data:image/png;base64,") ? await pixels(await (await fetch(start.png)).blob()) : game.starts[start]?.rgba;
  if (!rgba) throw new Error("This world has no such picture to start from.");
  const { state, score } = await player.ask("start", { rgba: rgba.slice(), seed, foreign: Boolean(start?.png) });
  return { state, score, frames: rgba.slice() };
}

/** Play rounds that nobody sees until the browser has compiled what they need, unless somebody acts first. */
async function warm(moment) {
  for (let round = 0; round < WARM_ROUNDS && game.moment === moment && !game.busy; round++) {
    await player.ask("warm", { state: moment.state, action: null });
  }
}

/** Let an action follow, and show the moment after it; several wait for each other. */
function act(action, name) {
  if (!game.moment) return;
  complain("");
  if (last().outcome?.ended) return tell(OVER);
  if (game.waiting.length >= MAX_WAITING) return tell("One moment, please.");
  game.waiting.push({ action, item: game.listed(name, "…") });
  play();
}

const last = () => game.newest ?? game.moment;

async function play() {
  if (game.busy) return;
  game.busy = true;
  while (game.moment) {
    if (!game.waiting.length && game.running && !game.moment.outcome?.ended) game.waiting.push({ action: null, item: null });
    if (!game.waiting.length) break;
    if (screen.ahead > MAX_AHEAD_ROUNDS) {
      await new Promise((resolve) => setTimeout(resolve, 20));
      continue;
    }
    const { action, item } = game.waiting.shift();
    const parent = last();
    try {
      const made = await player.ask("step", { state: parent.state, action });
      if (item) item.textContent = `${Math.round(made.took_ms)} ms`;
      if (parent !== last()) continue; // undone meanwhile
      game.newest = { ...made, parent, action, round: parent.round + 1 };
      screen.add(game.newest);
      if (made.outcome?.ended) game.waiting = [];
    } catch (error) {
      if (item) item.textContent = "refused";
      game.running = false;
      complain(error.message);
    }
    game.controls.sampler.waiting = false;
  }
  game.busy = false;
}

/** Say what is known of a moment that is now shown. */
function arrived(moment) {
  game.moment = moment;
  if (game.newest?.round <= moment.round) game.newest = null;
  $("screen").setAttribute("aria-label", `The world after ${moment.round} rounds`);
  $("screen").dataset.round = moment.round;
  $("round").textContent = moment.round;
  if (moment.took_ms && moment.parent) $("making").textContent = `${Math.round(moment.took_ms)} ms`;
  const { outcome, probability } = moment;
  $("reward-row").hidden = !game.meta.outcome;
  if (game.meta.outcome) $("reward").textContent = outcome ? outcome.reward.toFixed(2) : "–";
  $("probability-row").hidden = !game.meta.code;
  if (game.meta.code) $("probability").textContent = probability ? `${(100 * probability).toPrecision(2)} %` : "–";
  tell(outcome?.ended ? OVER : moment.score > 1 ? UNKNOWN : "");
  document.body.toggleAttribute("data-over", Boolean(outcome?.ended));
  $("undo").disabled = !moment.parent;
  $("run").textContent = game.running ? "Pause" : "Run";
  pill(game.running ? "Running" : "Every action plays a round", "live");
  showKept();
}

/** Go to a moment that was played before. */
function goTo(moment) {
  game.running = false;
  game.waiting = [];
  game.newest = null;
  game.moment = moment;
  screen.jump(moment);
}

const showKept = () => game.showMoments(game.kept, game.moment, goTo);

/** Return the moments from the start to the one that is shown. */
function path() {
  const moments = [];
  for (let moment = game.moment; moment; moment = moment.parent) moments.unshift(moment);
  return moments;
}

function leave() {
  Object.assign(game, { moment: null, newest: null, waiting: [], running: false });
  screen.frames = [];
  delete document.body.dataset.live;
  document.body.removeAttribute("data-over");
  for (const name of ["undo", ...LIVE]) $(name).disabled = true;
  $("start").hidden = $("veil").hidden = false;
  $("act").hidden = $("shared").hidden = true;
  tell("");
  pill("Choose a start", "open");
}

// ---- what one takes away ------------------------------------------------------------------------------------

/** Return a link that plays the same film: start, seed and actions, and which model they are for. */
function film() {
  const actions = path().slice(1).map(({ action }) => action);
  const said = { model: game.meta.fingerprint, start: game.start, seed: game.seed, actions };
  const bytes = new TextEncoder().encode(JSON.stringify(said));
  const address = new URL(location.href);
  address.hash = btoa(String.fromCharCode(...bytes)).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
  return address.href;
}

/** Play the film of a link. */
async function replay(packed) {
  let said;
  try {
    const text = atob(packed.replaceAll("-", "+").replaceAll("_", "/"));
    said = JSON.parse(new TextDecoder().decode(Uint8Array.from(text, (each) => each.charCodeAt(0))));
  } catch {
    throw new Error("The link is damaged; ask for it again.");
  }
  if (said.model !== game.meta.fingerprint) throw new Error("The link is for another model; open it where it was made.");
  if (!Array.isArray(said.actions) || !Number.isSafeInteger(said.seed) || said.seed < 0) throw new Error("The link is damaged; ask for it again.");
  await player.ask("check", said.actions); // before any of them is played
  await begin(said.start, said.seed);
  for (const action of said.actions) {
    while (game.waiting.length >= MAX_WAITING) await new Promise((resolve) => setTimeout(resolve, 20));
    act(action, describe(action));
  }
}

const describe = (action) =>
  action ? Object.values(action).flat().map((each) => (typeof each === "object" ? "…" : each)).join(" ") : "wait";

async function saveGif() {
  const { GIFEncoder, quantize, applyPalette } = await import(await assets.module("runtime/gifenc.mjs"));
  const size = game.meta.size[0] * game.meta.size[1] * 4;
  const gif = GIFEncoder();
  for (const { frames } of path()) {
    for (let at = 0; at < frames.length; at += size) {
      const large = drawn(frames.subarray(at, at + size), factor());
      const { data } = large.getContext("2d").getImageData(0, 0, large.width, large.height);
      const palette = quantize(data, 256);
      gif.writeFrame(applyPalette(data, palette), large.width, large.height, { palette, delay: 1000 / game.meta.fps });
    }
  }
  gif.finish();
  save(new Blob([gif.bytes()], { type: "image/gif" }), "gif");
}

function savePng() {
  const { frames } = game.moment;
  const size = game.meta.size[0] * game.meta.size[1] * 4;
  drawn(frames.subarray(frames.length - size), factor()).toBlob((blob) => save(blob, "png"), "image/png");
}

function save(blob, suffix) {
  const href = URL.createObjectURL(blob);
  Object.assign(document.createElement("a"), { href, download: `${game.meta.name}-${game.moment.round}.${suffix}` }).click();
  setTimeout(() => URL.revokeObjectURL(href), 10_000);
}

async function share() {
  const address = film();
  history.replaceState(null, "", address);
  $("address").value = address;
  $("shared").hidden = false;
  $("address").select();
  try {
    await navigator.clipboard.writeText(address);
    tell("The link is on the clipboard.");
  } catch {
    tell("Copy the link below."); // browsers allow the clipboard on https and localhost only
  }
}

// ---- words on the page, and what a person does ----------------------------------------------------------------

const complain = (text) => ($("alert").textContent = text);
const tell = (text) => ($("said").textContent = text);

function pill(text, state) {
  $("link").textContent = text;
  $("link").dataset.state = state;
}

$("start").addEventListener("submit", (event) => {
  event.preventDefault();
  if (game.meta?.blank) begin({ text: $("text").value.trim() || $("text").placeholder });
});
$("file").addEventListener("change", async () => {
  const [file] = $("file").files;
  if (!file) return;
  try {
    // As a PNG of the world's size it fits into a link.
    await begin({ png: drawn(await pixels(file), 1).toDataURL("image/png") });
  } catch (error) {
    complain(error.message);
  }
  $("file").value = "";
});
$("undo").addEventListener("click", () => goTo(game.moment.parent));
$("fork").addEventListener("click", () => {
  if (!game.kept.includes(game.moment)) game.kept.push(game.moment);
  showKept();
});
$("run").addEventListener("click", () => {
  game.running = !game.running;
  arrived(game.moment);
  play();
});
$("wait").addEventListener("click", () => act(null, "wait"));
$("gif").addEventListener("click", saveGif);
$("png").addEventListener("click", savePng);
$("share").addEventListener("click", share);
$("again").addEventListener("click", () => goTo(path()[0]));
$("stop").addEventListener("click", leave);
document.addEventListener("keydown", (event) => {
  if (!game.moment) return;
  if (game.undoes(event)) $("undo").click();
  else game.controls?.pressed(event);
});
requestAnimationFrame((now) => screen.tick(now));
load().catch((error) => {
  $("loading").hidden = true;
  $("veil-text").textContent = "";
  pill("Not loaded", "closed");
  complain(error.message);
});
