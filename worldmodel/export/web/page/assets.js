// The files of a world: beside this page, or inside of it where all of it is one file. There, an element
// <script type="text/plain" id="file:NAME"> holds each as base64 of gzip, and a page from a disk may load nothing else.

const inside = (name) => document.getElementById(`file:${name}`);
const address = (name) => new URL(name, document.baseURI).href;

async function unpack(element) {
  const packed = Uint8Array.from(atob(element.textContent), (each) => each.charCodeAt(0));
  element.remove(); // megabytes of text
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

/** Return the bytes of a file; `seen` is told of every piece. Their number must be `size`, where that is known. */
export async function bytes(name, size = null, seen = () => {}) {
  const element = inside(name);
  if (element) {
    const unpacked = await unpack(element);
    seen(unpacked.length);
    return checked(name, unpacked, size);
  }
  let response;
  try {
    response = await fetch(address(name));
  } catch {
    throw new Error(`${name} could not be loaded; open this folder through a web server, or export it with --single-file.`);
  }
  if (!response.ok) throw new Error(`${name} is not here (HTTP ${response.status}); export the world again.`);
  const pieces = [];
  for (const reader = response.body.getReader(); ; ) {
    const { done, value } = await reader.read();
    if (done) break;
    pieces.push(value);
    seen(value.length);
  }
  return checked(name, new Uint8Array(await new Blob(pieces).arrayBuffer()), size);
}

function checked(name, found, size) {
  if (size !== null && found.length !== size) {
    throw new Error(`${name} has ${found.length} bytes in place of ${size}; copy the folder again.`);
  }
  return found;
}

const modules = new Map();

/** Return an address from which a module can be imported, also by a worker. */
export function module(name) {
  if (!modules.has(name)) modules.set(name, inside(name) ? dataAddress(inside(name)) : Promise.resolve(address(name)));
  return modules.get(name);
}

async function dataAddress(element) {
  const code = await unpack(element);
  let text = "";
  for (let at = 0; at < code.length; at += 0x8000) text += String.fromCharCode(...code.subarray(at, at + 0x8000));
  return `data:text/javascript;base64,${btoa(text)}`; // a page from a disk may not import from blobs
}

/** Start the worker; a classic one, since a page from a disk may not start others. */
export async function worker(name) {
  const element = inside(name);
  if (!element) return new Worker(address(name));
  return new Worker(URL.createObjectURL(new Blob([await unpack(element)], { type: "text/javascript" })));
}
