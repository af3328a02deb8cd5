// Plays a world apart from the page, so that the page never waits. Messages: { id, call, args } in, { id, value } or
// { id, error } out. States stay here under numbers, since their keys and values take megabytes.

const KEPT_PASTS = 16; // newest states that keep their keys and values
const states = new Map();
let world = null;
let lastState = 0;

const calls = {
  /** Build the graphs from their bytes; the modules come from addresses. */
  async load({ modules, files, meta, threads }) {
    const [ort, { World }] = await Promise.all([import(modules.ort), import(modules.world)]);
    ort.env.wasm.numThreads = threads;
    ort.env.wasm.wasmBinary = files.wasm;
    let tokenizer = null;
    if (files.tokenizer) {
      const { Tokenizer } = await import(modules.tokenizers);
      const read = (bytes) => JSON.parse(new TextDecoder().decode(bytes));
      tokenizer = new Tokenizer(read(files.tokenizer), read(files.tokenizer_config));
    }
    // "all" would fuse more, but takes longer to begin than it saves.
    const options = { executionProviders: ["wasm"], graphOptimizationLevel: "basic" };
    const graphs = {
      encode: await ort.InferenceSession.create(files.encode, options),
      round: await ort.InferenceSession.create(files.round, options),
      decode: await ort.InferenceSession.create(files.decode, options),
    };
    world = new World(ort, meta, graphs, tokenizer);
  },

  /** Start from a picture; one that is `foreign` gets an observation score. */
  async start({ rgba, seed, foreign }) {
    const state = await world.start(rgba, seed);
    return { state: keep(state), score: foreign ? await world.score(state, rgba) : null };
  },

  async imagine({ text, seed }) {
    return answer(await world.imagine(text, seed));
  },

  async step({ state, action }) {
    if (!states.has(state)) throw new Error("The worker has no such state.");
    return answer(await world.step(states.get(state), action));
  },

  /** Refuse actions that the world does not take. */
  check(actions) {
    for (const action of actions) world.tokens(action);
  },

  /** Play a round that nobody sees: the first ones are slow, while the browser compiles. */
  async warm({ state, action }) {
    const begin = performance.now();
    await world.step(states.get(state), action);
    return performance.now() - begin;
  },
};

function keep(state) {
  states.set(++lastState, state);
  const old = lastState - KEPT_PASTS;
  if (states.has(old)) states.set(old, world.forgetPast(states.get(old)));
  return lastState;
}

const answer = ({ state, ...shown }) => ({ ...shown, frames: shown.frames.slice(), state: keep(state) });

// One call after the other: graphs are not to run twice at once.
let last = Promise.resolve();
onmessage = ({ data: { id, call, args } }) => {
  last = last.then(async () => {
    const begin = performance.now();
    try {
      const value = (await calls[call](args)) ?? null;
      if (value?.state) value.took_ms = performance.now() - begin;
      postMessage({ id, value }, value?.frames ? [value.frames.buffer] : []);
    } catch (error) {
      postMessage({ id, error: error.message, refused: error.constructor.name === "ActionError" });
    }
  });
};
