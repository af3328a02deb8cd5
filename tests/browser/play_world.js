// Plays rounds with the modules and the worker of an exported page; returns the frames in base64.
async ({ start, seed, actions, foreign, threads = 1 }) => {
  const assets = await import("./assets.js");
  const meta = JSON.parse(new TextDecoder().decode(await assets.bytes("web.json")));
  const names = { encode: "encode.onnx", round: "round.onnx", decode: "decode.onnx", wasm: "runtime/ort.wasm" };
  if (meta.action.kinds.text) {
    Object.assign(names, { tokenizer: "tokenizer.json", tokenizer_config: "tokenizer_config.json" });
  }
  const files = {};
  for (const [key, name] of Object.entries(names)) files[key] = await assets.bytes(name, meta.files[name]);
  const modules = {
    ort: await assets.module("runtime/ort.mjs"),
    world: await assets.module("world.js"),
    tokenizers: await assets.module("runtime/tokenizers.mjs"),
  };
  const worker = await assets.worker("worker.js");
  const ask = (call, args) =>
    new Promise((resolve, reject) => {
      worker.onmessage = ({ data }) => (data.error === undefined ? resolve(data.value) : reject(new Error(data.error)));
      worker.postMessage({ id: 1, call, args });
    });
  await ask("load", { modules, files, meta, threads });
  const bytes = (text) => Uint8Array.from(atob(text), (each) => each.charCodeAt(0));
  const text = (array) => {
    let out = "";
    for (const each of array) out += String.fromCharCode(each);
    return btoa(out);
  };
  let made = start.text
    ? await ask("imagine", { text: start.text, seed })
    : await ask("start", { rgba: bytes(start.rgba), seed, foreign });
  if (foreign) return made.score;
  const rounds = made.frames ? [{ frames: text(made.frames) }] : [];
  for (const action of actions) {
    made = await ask("step", { state: made.state, action });
    const { outcome, probability, took_ms: took } = made;
    rounds.push({ frames: text(made.frames), outcome, probability, took });
  }
  worker.terminate();
  return rounds;
}
