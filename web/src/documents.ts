/** Documents: unpacked from the page or read from a file, and checked before anything draws them. */
import { bytes } from "./format";

export interface Document {
  name: string;
  kind: string;
  /** The JSON as it was written. */
  text: string;
  // Views name the type that they expect. A document that differs makes them fail, which `views` catches.
  data: any;
}

/** A sentence that says why a file cannot be shown, and what to do. */
export class Refusal extends Error {}

const SCHEMA = 1;
const BYTES_MAX = 50 * 2 ** 20;

/** Reads the documents that pagetax put into the page. */
export async function embedded(page: ParentNode): Promise<(Document | Refusal)[]> {
  const packed = [...page.querySelectorAll<HTMLScriptElement>("script.document")];
  const results = packed.map(async (script) => {
    const name = script.dataset["name"] ?? "document";
    return attempt(async () => parse(name, await unpack(name, script.textContent ?? "")));
  });
  return (await Promise.all(results)).flat();
}

/** Reads a file: JSON, or a page that pagetax made. */
export async function fromFile(file: File): Promise<(Document | Refusal)[]> {
  const text = await attempt(async () => {
    if (file.size > BYTES_MAX) throw tooLarge(file.name, file.size);
    return [await file.text()];
  });
  const [read] = text;
  if (typeof read !== "string") return text as Refusal[];
  if (!/^\s*</.test(read)) return attempt(async () => parse(file.name, read));
  const documents = await embedded(new DOMParser().parseFromString(read, "text/html"));
  const none = new Refusal(
    `${file.name} is a page without documents. Choose a page that pagetax report made, or JSON.`,
  );
  return documents.length > 0 ? documents : [none];
}

async function attempt<T>(work: () => Promise<T[]>): Promise<(T | Refusal)[]> {
  try {
    return await work();
  } catch (error) {
    return [error instanceof Refusal ? error : new Refusal(String(error))];
  }
}

const tooLarge = (name: string, size: number) =>
  new Refusal(
    `${name} has ${bytes(size)}; a page reads at most ${bytes(BYTES_MAX)}. Write fewer points: give --interval a longer time, or fewer --runs.`,
  );

const notComplete = (name: string) =>
  new Refusal(`${name} is not complete JSON. Write it again with --json=FILE.`);

async function unpack(name: string, base64: string): Promise<string> {
  try {
    const packed = Uint8Array.from(atob(base64.trim()), (digit) => digit.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    return await readAll(name, stream);
  } catch (error) {
    throw error instanceof Refusal ? error : notComplete(name);
  }
}

/** Stops at the limit: a small gzip file may unpack to any size. */
async function readAll(name: string, stream: ReadableStream<Uint8Array>): Promise<string> {
  const decoder = new TextDecoder();
  const reader = stream.getReader();
  let text = "";
  for (let size = 0; ;) {
    const { done, value } = await reader.read();
    if (done) return text + decoder.decode();
    size += value.length;
    if (size > BYTES_MAX) {
      void reader.cancel();
      throw tooLarge(name, size);
    }
    text += decoder.decode(value, { stream: true });
  }
}

/** Parses a file. Several runs may follow one another; they are shown and compared together. */
function parse(name: string, text: string): Document[] {
  // A document begins at the start of a line, and nothing inside one does.
  const parts = text.split(/^(?=\{)/m).filter((part) => part.trim() !== "");
  const documents = parts.map((part) => parseOne(name, part));
  if (documents.length > 1 && documents.every(({ kind }) => kind === "run")) {
    const runs = documents.map(({ data }) => data);
    return [{ name, kind: "runs", text, data: { schema: SCHEMA, kind: "runs", swept: [], runs } }];
  }
  if (documents.length === 0) throw notComplete(name);
  return documents;
}

function parseOne(name: string, text: string): Document {
  let data;
  try {
    data = JSON.parse(text, /\d{16}/.test(text) ? exactly : undefined);
  } catch {
    throw notComplete(name);
  }
  if (typeof data?.kind !== "string" || typeof data.schema !== "number") {
    throw new Refusal(
      `${name} is no document of pagetax. Write one with pagetax run --json=FILE or pagetax diagnose --json=FILE.`,
    );
  }
  if (data.schema !== SCHEMA) {
    throw new Refusal(
      `${name} has schema ${data.schema}; this page reads schema ${SCHEMA}. Make the page with the pagetax that wrote the document.`,
    );
  }
  return { name, kind: data.kind, text, data };
}

/** Keeps integers that a double cannot hold, where the browser shows their digits. */
function exactly(_key: string, value: unknown, context?: { source?: string }): unknown {
  const isInexact = typeof value === "number" && Number.isInteger(value) && !Number.isSafeInteger(value);
  return isInexact && /^-?\d+$/.test(context?.source ?? "") ? BigInt(context!.source!) : value;
}
