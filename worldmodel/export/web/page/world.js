// One world: what a round needs from the rounds before, actions to tokens, and the draws of uncertain worlds.
// The counterpart in Python: rollout/round.py, models/action.py.

const CODE_STREAM = 2n ** 61n; // keeps the numbers of codes apart from those of noise, as in Python
const MAX_CHARACTERS_PER_TOKEN = 40;

/** An action that the model does not take; its message is for people. */
export class ActionError extends Error {}

/** A world between two rounds. Nothing in it is changed, so several rounds can follow one state. */
class State {
  constructor(fields) {
    Object.assign(this, fields);
  }
}

export class World {
  /** @param {object} ort onnxruntime-web  @param {object} meta web.json  @param {object} graphs encode, round and decode  @param {object} tokenizer of texts, if the model takes any */
  constructor(ort, meta, graphs, tokenizer) {
    Object.assign(this, { ort, meta, graphs, tokenizer });
  }

  /** Start a world from the RGBA bytes of a picture of the model's size. */
  async start(rgba, seed) {
    const [height, width] = this.meta.size;
    const frame = new this.ort.Tensor("uint8", rgba, [height, width, 4]);
    const { context } = await this.graphs.encode.run({ frame });
    return new State({ context, seed, round: 0, history: [], past: this.noPast(), code: this.noCode() });
  }

  /** Return how unlike what the model knows a picture is, from which a state began; null if the model does not say. */
  async score(state, rgba) {
    const { known } = this.meta;
    if (!known) return null;
    const { first } = await this.graphs.decode.run({ latents: state.context });
    let error = 0;
    first.data.forEach((value, i) => {
      error += Math.abs(Math.min(255, Math.max(0, value)) - rgba[Math.floor(i / 3) * 4 + (i % 3)]);
    });
    const { distance } = await this.predict(state, null);
    return Math.max(error / first.data.length / known.error, distance.data[0] / known.distance);
  }

  /** Start a world from a text; returns what `step` returns. */
  async imagine(text, seed) {
    const { blank } = this.meta;
    if (!blank) throw new ActionError("This world does not begin from a text; choose a picture.");
    const context = new this.ort.Tensor("float32", Float32Array.from(blank.values), blank.shape);
    const before = new State({ context, seed, round: -1, history: [], past: this.noPast(), code: this.noCode() });
    const made = await this.step(before, { text });
    // The first observation is all that a world keeps of the text.
    return { ...made, state: new State({ ...made.state, round: 0, history: [], past: this.noPast(), code: this.noCode() }) };
  }

  /** Play a round; returns the state after it, its frames (RGBA) and its outcome. */
  async step(state, action) {
    const made = await this.predict(state, action);
    const { frames } = await this.graphs.decode.run({ latents: made.forecast });
    return {
      state: new State({
        context: made.next_context,
        seed: state.seed,
        round: state.round + 1,
        history: [...this.remembered(state), made.round.data],
        past: made.present,
        code: made.next_code ?? state.code,
      }),
      frames: frames.data,
      count: frames.dims[0],
      outcome: made.reward ? { reward: made.reward.data[0], ended: made.end.data[0] > 0 } : null,
      probability: made.log_probability ? Math.exp(made.log_probability.data[0]) : null,
    };
  }

  /** Return the rounds before that the next one sees. */
  remembered({ history }) {
    // As in Python, the oldest rounds are dropped several at once: positions change, and keys and values are then
    // computed again.
    const kept = this.meta.history_rounds;
    return history.length > 2 * kept ? history.slice(-kept) : history;
  }

  /** Run the graph of a round. */
  predict(state, action) {
    const { ort, meta } = this;
    const { ids, numbers } = this.tokens(action);
    const history = this.remembered(state);
    const again = history !== state.history || state.past === null;
    const feeds = {
      context: state.context,
      action: new ort.Tensor("int64", BigInt64Array.from(ids, BigInt), [ids.length]),
      prefix: this.rows(again ? history : []),
      past: again ? this.noPast() : state.past,
    };
    if (meta.numbers) feeds.numbers = numbers;
    if (meta.code) {
      feeds.code = state.code;
      const draws = uniform(state.seed, state.round, meta.code.length);
      feeds.draws = new ort.Tensor("float32", draws, [1, meta.code.length]);
    }
    return this.graphs.round.run(feeds);
  }

  /** Keys and values of a state take megabytes; without them its next round computes its history again. */
  forgetPast(state) {
    return new State({ ...state, past: null });
  }

  noPast() {
    const { layers, heads, width } = this.meta.past;
    return new this.ort.Tensor("float32", new Float32Array(0), [layers, 2, 1, heads, 0, width]);
  }

  noCode() {
    const { code } = this.meta;
    return code && new this.ort.Tensor("float32", new Float32Array(code.length * code.classes), [1, code.length, code.classes]);
  }

  rows(parts) {
    const joined = new Float32Array(parts.reduce((sum, part) => sum + part.length, 0));
    let at = 0;
    for (const part of parts) {
      joined.set(part, at);
      at += part.length;
    }
    return new this.ort.Tensor("float32", joined, [joined.length / this.meta.width, this.meta.width]);
  }

  /** Return rows of the table of tokens, padding first, and the numbers of an action. */
  tokens(action) {
    const { meta } = this;
    const actions = action?.chunk ?? Array(meta.action.per_round).fill(action ?? {});
    if (!Array.isArray(actions) || actions.some((each) => typeof each !== "object" || each === null || Array.isArray(each))) {
      throw new ActionError("That is no action; an action names what it gives, such as keys.");
    }
    if (actions.length !== meta.action.per_round) {
      throw new ActionError(`The action has ${actions.length} parts, and a round has ${meta.action.per_round}.`);
    }
    const ids = [];
    const kinds = meta.numbers?.kinds ?? [];
    const numbers = new Float32Array(meta.numbers ? actions.length * kinds.length * meta.numbers.widest : 0);
    actions.forEach((each, place) => {
      for (const name of Object.keys(each)) {
        if (!(name in meta.action.kinds)) throw new ActionError(`This world takes no ${name}.`);
      }
      ids.push(meta.tokens.marker + place, ...this.words(each.text), ...this.keys(each));
      kinds.forEach((kind, index) => {
        if (each[kind.name] === undefined || each[kind.name] === null) return;
        const row = place * kinds.length + index;
        numbers.set(numbersOf(kind, each[kind.name]), row * meta.numbers.widest);
        ids.push(meta.tokens.rows + row);
      });
    });
    const padding = (meta.tokens.slot - (ids.length % meta.tokens.slot)) % meta.tokens.slot;
    return {
      ids: [...Array(padding).fill(meta.tokens.blank), ...ids],
      numbers: meta.numbers && new this.ort.Tensor("float32", numbers, [actions.length * kinds.length, meta.numbers.widest]),
    };
  }

  words(text) {
    if (text === undefined || text === null) return [];
    if (typeof text !== "string") throw new ActionError("The text of the action is none.");
    const words = text.trim();
    const most = this.meta.tokens.max_text;
    const ids = words.length > MAX_CHARACTERS_PER_TOKEN * most ? null : this.tokenizer.encode(words, { add_special_tokens: false }).ids;
    if (!ids?.length || ids.length > most) {
      throw new ActionError(words ? "The action is too long; use one short sentence." : "The action is empty; describe what happens.");
    }
    return ids;
  }

  keys(action) {
    return Object.entries(this.meta.tokens.names).flatMap(([kind, { first, names }]) => {
      const held = action[kind] ?? [];
      if (!Array.isArray(held)) throw new ActionError(`The ${kind} of the action are no list.`);
      for (const name of held) {
        if (!names.includes(name)) throw new ActionError(`This world has no key “${name}”; it has ${names.join(", ")}.`);
      }
      if (new Set(held).size < held.length) throw new ActionError(`The keys ${held.join(", ")} name a key twice.`);
      return held.map((name) => first + names.indexOf(name));
    });
  }
}

/** Return what the network of a kind of numbers gets for a value of an action. */
function numbersOf({ name, size, low, high, scaled, buttons }, value) {
  if (buttons) {
    const written = JSON.stringify(value); // of a button of this page, also in a link
    const button = buttons.find((each) => JSON.stringify(each.value) === written);
    if (!button) throw new ActionError(`This page has no such ${name} action; it has those of its buttons.`);
    return button.numbers;
  }
  if (!Array.isArray(value) || value.length !== size || !value.every(Number.isFinite)) {
    throw new ActionError(`The ${name} of the action needs ${size} numbers.`);
  }
  low.forEach((least, i) => {
    const tolerance = 1e-6 * Math.max(1, Math.abs(least), Math.abs(high[i])); // for bounds rounded to float32
    if (value[i] >= least - tolerance && value[i] <= high[i] + tolerance) return;
    throw new ActionError(`The ${name} of the action has the number ${value[i]}; use ${least} to ${high[i]}.`);
  });
  return scaled && low.length ? value.map((x, i) => (2 * (x - low[i])) / (high[i] - low[i]) - 1) : value;
}

/** Draw the numbers in [0, 1) that PyTorch's generator gives for a seed and a round (`draw_uniform`). */
export function uniform(seed, round, count) {
  const mixed = (BigInt(seed) * 1_000_003n + BigInt(round) + 1n + CODE_STREAM) % 2n ** 63n;
  const next = mersenneTwister(Number(mixed & 0xffffffffn));
  return Float32Array.from({ length: count }, () => (next() & 0xffffff) / 0x1000000);
}

/** MT19937 (Matsumoto and Nishimura, 1998), as PyTorch's CPU generator. */
function mersenneTwister(seed) {
  const size = 624;
  const words = new Uint32Array(size);
  words[0] = seed;
  for (let i = 1; i < size; i++) words[i] = Math.imul(1812433253, words[i - 1] ^ (words[i - 1] >>> 30)) + i;
  let at = size;
  const twist = () => {
    for (let i = 0; i < size; i++) {
      const y = (words[i] & 0x80000000) | (words[(i + 1) % size] & 0x7fffffff);
      words[i] = words[(i + 397) % size] ^ (y >>> 1) ^ (y & 1 ? 0x9908b0df : 0);
    }
    at = 0;
  };
  return () => {
    if (at === size) twist();
    let y = words[at++];
    y ^= y >>> 11;
    y ^= (y << 7) & 0x9d2c5680;
    y ^= (y << 15) & 0xefc60000;
    return (y ^ (y >>> 18)) >>> 0;
  };
}
