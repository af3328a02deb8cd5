// Plays one live world over WS /v1/realtime/video (see /asyncapi.yaml): chunks of frames in, actions out.

import { Controls, isFree, listed, onRelease, showMoments, undoes } from "./controls.js";

const $ = (id) => document.getElementById(id);
const LEAST_SIDE = 512;
const OVER = "The episode ends here. Undo, return to a fork, or start again.";
const UNKNOWN = "This world does not know that picture, and will make something else of it.";
const LOSSLESS_SIDE = 128; // pixels
const LOOK = "look"; // event id of the descriptions that say which things are there
const ASKED = "asked"; // event id of those that a person asked for
const LIVE = ["run", "wait", "undo", "fork", "describe", "record", "again", "steer", "stop"]; // what one can do while a world is live
const CLIP_BITS_PER_S = 8e6;
const CLIPS = ["video/mp4", "video/webm"]; // the first one that the browser can write
const SHOWN_EVERY_MS = 250; // between messages that say what was shown
const MAX_AHEAD_CHUNKS = 2; // a tab that was hidden drops frames instead of lagging

const session = {
  socket: null,
  hello: null, // session.created
  controls: null, // of the actions of the model
  over: false, // the episode has ended: the model was trained on nothing after it
  live: false,
  origin: null, // the file or { world } from which the world began, if it was none of words
  next: null, // { origin } of a world that begins when the connection has ended
  recorder: null, // of a clip
  pace: "realtime",
  expecting: null, // metadata of the chunk whose binary messages follow
  chunks: [], // { frame, round }: the chunk that is shown, and those that follow it
  oldest: 0, // round to which one can go back
  kept: [], // { round, snapshot } of moments to return to
  asked: new Map(), // event_id → { at, item: the element that says what became of it }
  descriptions: [], // event ids: the first one is in progress, as the server makes one at a time
  count: 0,
};

// ---- the screen -------------------------------------------------------------------------------------------

const screen = {
  context: $("screen").getContext("2d"),
  frames: [], // { index, bitmap }
  nextAt: 0,
  shownAt: 0, // when the server was told what was shown
  timed: [], // { frame, eventId }: actions whose first frame has not been shown
  decoding: Promise.resolve(),

  add(index, blob, generation) {
    // Decode in order: a small frame could overtake a large one.
    this.decoding = this.decoding.then(async () => {
      const bitmap = await createImageBitmap(blob);
      if (generation === session.count) this.frames.push({ index, bitmap });
      else bitmap.close();
    }).catch(() => complain("A frame could not be decoded."));
  },

  tick(now) {
    if (session.live) session.controls.gamepads(navigator.getGamepads?.() ?? []);
    const { fps = 8, chunk_frames: chunk = 8 } = session.hello ?? {};
    while (this.frames.length > MAX_AHEAD_CHUNKS * chunk) this.frames.shift().bitmap.close();
    const shows = this.frames.length > 0;
    const goesOn = shows || (session.pace !== "realtime" && session.controls?.sampler.due); // a paused world shows nothing
    if (goesOn && now >= this.nextAt) {
      if (shows) this.show(this.frames.shift());
      session.controls?.sampler.frame();
      // A late frame resets the schedule; frames on time keep it without drift.
      this.nextAt = (now - this.nextAt > 2000 / fps ? now : this.nextAt) + 1000 / fps;
    }
    requestAnimationFrame((then) => this.tick(then));
  },

  show({ index, bitmap }) {
    const { width, height } = this.context.canvas;
    this.context.imageSmoothingEnabled = false;
    this.context.drawImage(bitmap, 0, 0, width, height);
    bitmap.close();
    $("screen").dataset.frame = index;
    while (session.chunks[1]?.frame <= index) session.chunks.shift();
    session.controls.sampler.waiting = false;
    const now = performance.now();
    this.clock(index, now);
    // The server makes no more where nobody sees it, as in a tab in the background.
    if (now - this.shownAt < SHOWN_EVERY_MS) return;
    this.shownAt = now;
    send("session.playback", { frames: index + 1 });
  },

  clock(index, now) {
    while (this.timed.length && this.timed[0].frame <= index) {
      const asked = session.asked.get(this.timed.shift().eventId);
      if (!asked) continue;
      const took = now - asked.at;
      $("latency").textContent = duration(took);
      asked.item.textContent = duration(took);
    }
  },

  clear() {
    for (const { bitmap } of this.frames) bitmap.close();
    this.frames = [];
    this.timed = [];
    this.nextAt = 0;
  },
};

const duration = (ms) => (ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(1)} s`);

// ---- the socket -------------------------------------------------------------------------------------------

function connect() {
  const key = $("key").value.trim();
  const address = new URL("v1/realtime/video", location.href);
  address.protocol = location.protocol === "https:" ? "wss:" : "ws:";
  address.search = address.hash = "";
  // A browser cannot set headers here: the key travels as a subprotocol, which the server never echoes.
  const offers = key ? ["worldmodel.v1", `worldmodel.key.${key}`] : ["worldmodel.v1"];
  link("Connecting…", "connecting");
  return new Promise((resolve, reject) => {
    let socket;
    try {
      socket = new WebSocket(address, offers);
    } catch {
      reject(new Error("The API key has invalid characters."));
      return;
    }
    socket.binaryType = "blob";
    session.socket = socket;
    session.hello = null;
    socket.onmessage = ({ data }) => {
      if (socket !== session.socket) return;
      if (typeof data !== "string") return media(data);
      const event = JSON.parse(data);
      (HANDLERS[event.type] ?? (() => {}))(event);
      if (event.type === "session.created") resolve();
    };
    socket.onclose = ({ code }) => {
      if (socket !== session.socket) return;
      const met = session.hello !== null;
      ended();
      if (session.next) {
        const { origin } = session.next;
        session.next = null;
        start(origin);
        return;
      }
      if (code === 1000) link("Ended", "ended");
      else link(met ? "Not connected" : "No connection", "closed");
      if (!met) {
        $("locked").hidden = false;
        reject(new Error("The server refused the connection. If it requires an API key, enter it and start again."));
      } else if (code !== 1000 && !$("alert").textContent) {
        complain("The connection was closed. Start a new world.");
      }
    };
  });
}

function send(type, fields = {}) {
  if (session.socket?.readyState !== WebSocket.OPEN) return false;
  session.socket.send(JSON.stringify({ type, ...fields }));
  return true;
}

function media(blob) {
  const chunk = session.expecting;
  if (!chunk) return;
  screen.add(chunk.first_frame + chunk.received, blob, session.count);
  chunk.received += 1;
  if (chunk.received === chunk.num_messages) session.expecting = null;
}

const HANDLERS = {
  "session.created"(event) {
    session.hello = event;
    const [height, width = height] = [event.image_size].flat();
    $("model").textContent = `${event.model} · ${width} x ${height} px · ${event.fps} frames a second`;
    $("about").textContent = event.about;
    $("steps").placeholder = `${event.num_inference_steps}, as the model says`;
    $("guidance").placeholder = `${event.guidance_scale}, as the model says`;
    $("steps").max = event.limits.max_inference_steps;
    for (const name of ["steps", "guidance"]) $(name).disabled = !event.limits.max_inference_steps;
    session.controls = new Controls(event, act, $("screen"), session.controls?.thing);
    const can = (task) => event.tasks.includes(task);
    $("imagine").hidden = !can("imagine");
    $("describe").hidden = !can("describe");
    $("wait").hidden = event.pace === "on_action"; // then it was trained with an action in every round
    $("go").hidden = !can("imagine") && !$("file").files.length;
    $("paused").checked = event.pace === "on_action";
    offer(event.model);
    link("Connected", "open");
  },
  "video.start"(event) {
    session.live = true;
    session.controls.sampler.clear();
    const canvas = $("screen");
    // Whole pixels: what is enlarged stays sharp, and the browser only shrinks what is large.
    const scale = Math.max(1, Math.round(LEAST_SIDE / Math.min(event.width, event.height)));
    [canvas.width, canvas.height] = [event.width * scale, event.height * scale];
    paced(event.pace);
    document.body.dataset.live = "";
    $("start").hidden = true;
    $("act").hidden = false;
    $("veil").textContent = "";
    $("veil").hidden = true;
    $("screen").setAttribute("aria-label", "The world, live");
    for (const name of LIVE) $(name).disabled = false;
    $("run").focus({ preventScroll: true });
    if (event.observation_score > 1) tell(UNKNOWN);
  },
  "video.chunk_metadata"(event) {
    session.expecting = { ...event, received: 0 };
    $("round").textContent = event.round;
    $("reward-row").hidden = event.outcome === null;
    if (event.outcome) {
      $("reward").textContent = event.outcome.reward.toFixed(2);
    }
    session.over = Boolean(event.outcome?.ended);
    document.body.toggleAttribute("data-over", session.over);
    if (session.over) tell(OVER);
    if (event.source === "round") $("making").textContent = duration(event.generation_s * 1000);
    if (event.source !== "round") {
      screen.clear();
      session.chunks = [];
    }
    if (event.source === "start" || event.source === "restore") session.oldest = event.round;
    session.chunks.push({ frame: event.first_frame, round: event.round });
    // None of the moments to return to is the present one any more.
    if (event.source === "round" || event.source === "undo") for (const button of $("moments").children) button.setAttribute("aria-pressed", false);
    if (event.source !== "round" || event.action) look();
  },
  "session.interaction.queued": (event) => mark(event.event_id, "waits"),
  "session.interaction.applied"(event) {
    mark(event.event_id, "on its way");
    screen.timed.push({ frame: event.frame, eventId: event.event_id });
  },
  "session.interaction.dropped": (event) => mark(event.event_id, event.reason),
  "session.updated": (event) => paced(event.pace),
  "session.snapshot.created"(event) {
    // The server keeps the newest ones.
    session.kept = [...session.kept, event].slice(-session.hello.limits.max_snapshots);
    showKept(event);
  },
  "session.restored"(event) {
    tell("");
    showKept(session.kept.find(({ snapshot }) => snapshot === event.snapshot));
  },
  "session.undone": () => tell(""),
  "session.forked"(event) {
    // Nobody can do anything with an id who does not have this server and its key.
    window.parent.postMessage({ world: event.world }, "*");
    send("session.stop");
  },
  "session.described"(event) {
    described();
    if (event.event_id === LOOK) session.controls.present(event.text);
    else tell(event.text ? `“${event.text}”` : "The model has no description.");
  },
  "session.done"(event) {
    const why = {
      idle: "The world was closed after a period without input.",
      session_limit: "The session has reached its time limit.",
      round_limit: "The world has reached its maximum number of rounds.",
      model_unloaded: "The server no longer has this model. Start another world.",
      server_stopping: "The server changes to another world, or stops. Reload the page to play on.",
    }[event.reason];
    if (why) complain(why);
  },
  error(event) {
    if (event.event_id === session.descriptions[0]) described();
    if (event.event_id === LOOK) return;
    complain(event.error.message);
    if (session.controls) session.controls.sampler.waiting = false;
    if (event.event_id) mark(event.event_id, "refused");
    if (event.fatal) session.socket.close();
    else if (!session.live) ended(); // the start was refused: another one may follow
  },
};

function ended() {
  session.live = session.over = false;
  document.body.removeAttribute("data-over");
  session.expecting = null;
  session.kept = [];
  showKept();
  session.descriptions = [];
  delete document.body.dataset.live;
  for (const name of LIVE) $(name).disabled = true;
  if (session.recorder) record(); // keep what there is
  $("start").hidden = false;
  $("act").hidden = true;
  $("go").disabled = false;
  $("go").textContent = "Start";
  $("veil").hidden = false;
  $("veil").textContent = "Choose a scene to start.";
  $("screen").setAttribute("aria-label", "No live world");
}

// ---- acting -----------------------------------------------------------------------------------------------

function act(action, name, at = performance.now()) {
  if (!session.live) return;
  if (session.over) return tell(OVER);
  complain("");
  const eventId = `e${++act.number}`;
  session.asked.set(eventId, { at, item: listed(name, "sent") });
  if (session.asked.size > 64) session.asked.delete(session.asked.keys().next().value);
  // In a world that runs the newest action counts; in one that waits, and of lists for a round, each has its turn.
  const replace = session.pace === "realtime" && !action?.chunk;
  send("session.interaction", { interaction: { event_id: eventId, event: { action } }, replace });
}
act.number = 0;

/** Go back by the round that is shown, and pause: the world would play it again. */
function undo() {
  complain("");
  const { round } = session.chunks[0] ?? {};
  if (session.pace === "realtime") send("session.update", { pace: "on_action" });
  send("session.undo", round > session.oldest ? { round: round - 1 } : {});
}

const showKept = (here) =>
  showMoments(session.kept, here, ({ snapshot }) => send("session.restore", { snapshot }));

/** Ask the model which things are there, if it can say so. */
function look() {
  if ($("things").children.length && session.hello.tasks.includes("describe")) describe(LOOK);
}

/** Ask for a description of the newest frame, once the one in progress has arrived. */
function describe(eventId) {
  if (session.descriptions.lastIndexOf(eventId) > 0) return; // it waits already
  session.descriptions.push(eventId);
  if (session.descriptions.length === 1) send("session.describe", { event_id: eventId });
}

function described() {
  session.descriptions.shift();
  if (session.descriptions.length) send("session.describe", { event_id: session.descriptions[0] });
}

// ---- clips --------------------------------------------------------------------------------------------------

/** Record what is shown, or end the recording and save it. */
function record() {
  if (session.recorder) return session.recorder.stop();
  const mimeType = CLIPS.find((type) => MediaRecorder.isTypeSupported(type));
  const recorder = new MediaRecorder($("screen").captureStream(), { mimeType, videoBitsPerSecond: CLIP_BITS_PER_S });
  const parts = [];
  recorder.ondataavailable = ({ data }) => parts.push(data);
  recorder.onstop = () => {
    for (const track of recorder.stream.getTracks()) track.stop();
    session.recorder = null;
    $("record").textContent = "Record";
    const name = `${session.hello?.model ?? "world"}.${mimeType.split("/")[1]}`;
    save(new File(parts, name, { type: mimeType }));
  };
  recorder.start();
  session.recorder = recorder;
  $("record").textContent = "Save clip";
}

/** Share a file where one shares by touch, and download it elsewhere. */
async function save(file) {
  if (matchMedia("(pointer: coarse)").matches && navigator.canShare?.({ files: [file] })) {
    try {
      return await navigator.share({ files: [file] });
    } catch (error) {
      if (error.name === "AbortError") return; // the person changed their mind
    }
  }
  const href = URL.createObjectURL(file);
  Object.assign(document.createElement("a"), { href, download: file.name }).click();
  setTimeout(() => URL.revokeObjectURL(href), 10_000);
}

// ---- words on the page ------------------------------------------------------------------------------------

const complain = (text) => ($("alert").textContent = text);
const tell = (text) => ($("said").textContent = text);
const mark = (eventId, text) => {
  const asked = session.asked.get(eventId);
  if (asked) asked.item.textContent = text;
};

function link(text, state) {
  $("link").textContent = text;
  $("link").dataset.state = state;
}

function paced(pace) {
  session.pace = pace;
  $("run").textContent = pace === "realtime" ? "Pause" : "Run";
  link(pace === "realtime" ? "Live" : "Paused: every action plays one moment", "live");
}

/** Show the images that the server offers to start from. */
async function offer(model) {
  const key = $("key").value.trim();
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  const response = await fetch(`v1/models/${encodeURIComponent(model)}/start_images`, { headers });
  if (!response.ok) return;
  const { data } = await response.json();
  $("tiles").hidden = !data.length;
  $("tiles").replaceChildren(...data.map(({ title, b64_json: png }) => {
    const button = Object.assign(document.createElement("button"), { type: "button", title });
    button.append(Object.assign(document.createElement("img"), { src: `data:image/png;base64,${png}`, alt: title }));
    button.addEventListener("click", () =>
      start(new Blob([Uint8Array.from(atob(png), (each) => each.charCodeAt(0))], { type: "image/png" })));
    return button;
  }));
}

// ---- what a person does -----------------------------------------------------------------------------------

/** Start from a file, from a world of the server ({ world }), or from the text. */
async function start(origin) {
  if ($("go").disabled) return; // it is starting
  complain("");
  session.origin = origin;
  const file = origin instanceof Blob ? origin : null;
  const text = $("text").value.trim() || (file ? "" : $("text").placeholder);
  $("go").disabled = true;
  $("go").textContent = "Starting…";
  try {
    // The server lets go of a socket on which nothing begins; then there is a new one.
    if (session.socket?.readyState !== WebSocket.OPEN || !session.hello) await connect();
    if ($("key").value) sessionStorage.setItem("worldmodel.key", $("key").value.trim());
    const most = session.hello.limits.max_upload_bytes;
    if (file && file.size > most) throw new Error(`The file is larger than ${Math.floor(most / 2 ** 20)} MiB; choose a smaller one.`);
    session.count += 1;
    session.asked.clear();
    screen.clear();
    $("log").replaceChildren();
    tell("");
    for (const name of ["latency", "making", "round"]) $(name).textContent = "–";
    const order = { format: frameFormat(), pace: $("paused").checked ? "on_action" : "realtime" };
    if (origin?.world) {
      send("session.start", { ...order, world: origin.world }); // which keeps its settings
    } else {
      order.seed = Number($("seed").value) || 0;
      if ($("steps").value) order.num_inference_steps = Number($("steps").value);
      if ($("guidance").value) order.guidance_scale = Number($("guidance").value);
      send("session.start", file ? { ...order, upload: true } : { ...order, text });
      if (file) session.socket.send(file);
    }
    $("veil").textContent = origin?.world ? "Opening the world…" : file ? "Reading the upload…" : "Imagining…";
  } catch (error) {
    complain(error.message);
    $("go").disabled = false;
    $("go").textContent = "Start";
  }
}

/** Start, after what is live has ended. */
function startNext(origin) {
  if (session.live && send("session.stop")) session.next = { origin };
  else start(origin);
}

/** Take what the page around this one says behind `#`: the key, whether it takes worlds, and a world to go on with. */
function told() {
  const said = new URLSearchParams(location.hash.slice(1));
  if (said.get("key")) {
    sessionStorage.setItem("worldmodel.key", said.get("key"));
    $("key").value = said.get("key");
  }
  if (said.has("steer")) $("steer").hidden = false;
  if (location.hash) history.replaceState(null, "", location.pathname + location.search); // the key does not stay in it
  return said.get("world");
}

/** Small frames without loss, which is hardly more bytes; large ones as JPEG. */
const frameFormat = () => (Math.max(...[session.hello.image_size].flat()) <= LOSSLESS_SIDE ? "png" : "jpeg");

function pressed(event) {
  if (!session.live || !isFree(event)) return;
  if (undoes(event)) {
    $("undo").click();
    return;
  }
  if (event.key === " " && !event.target.closest("button, summary, a")) {
    event.preventDefault();
    $("run").click();
    return;
  }
  session.controls?.pressed(event);
}

if (window.top !== window) document.body.dataset.embedded = ""; // the page around it has a title
$("key").value = sessionStorage.getItem("worldmodel.key") ?? "";
const brought = told();
window.addEventListener("hashchange", () => {
  const world = told();
  if (world) startNext({ world });
});
$("start").addEventListener("submit", (event) => {
  event.preventDefault();
  start($("file").files[0]);
});
$("file").addEventListener("change", () => {
  const file = $("file").files[0];
  $("go").hidden = $("imagine").hidden && !file;
  $("filename").textContent = file ? file.name : "PNG, JPEG, WebP or MP4";
  $("unfile").hidden = !file;
  $("text").disabled = Boolean(file);
});
$("unfile").addEventListener("click", () => {
  $("file").value = "";
  $("file").dispatchEvent(new Event("change"));
  $("text").focus();
});
$("run").addEventListener("click", () =>
  send("session.update", { pace: session.pace === "realtime" ? "on_action" : "realtime" }));
$("wait").addEventListener("click", () => act(null, "wait"));
$("undo").addEventListener("click", undo);
$("fork").addEventListener("click", () => send("session.snapshot"));
$("steer").addEventListener("click", () => send("session.fork"));
$("describe").addEventListener("click", () => {
  describe(ASKED);
  tell("…");
});
$("record").hidden = !globalThis.MediaRecorder;
$("record").addEventListener("click", record);
$("again").addEventListener("click", () => startNext(session.origin));
$("stop").addEventListener("click", () => send("session.stop"));
document.addEventListener("keydown", pressed);
onRelease(() => session.controls);
requestAnimationFrame((now) => screen.tick(now));
connect().then(() => brought && start({ world: brought }), (error) => complain(error.message));
