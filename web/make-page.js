/** Puts documents into the page as pagetax does: node make-page.js OUT.html FILE.json … */
import { readFileSync, writeFileSync } from "node:fs";
import { basename } from "node:path";
import { fileURLToPath } from "node:url";
import { gzipSync } from "node:zlib";

const ASSET = new URL("../crates/cli/assets/report.html", import.meta.url);
const MARKER = "<!--pagetax:documents-->";
const ESCAPES = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" };

/** Returns the page with these documents, each with its `name` and its `text`. */
export function makePage(documents) {
  const scripts = documents.map(({ name, text }) => {
    const escaped = name.replace(/[&<>"]/g, (sign) => ESCAPES[sign]);
    return `<script type="application/gzip;base64" class="document" data-name="${escaped}">${gzipSync(text).toString("base64")}</script>`;
  });
  return readFileSync(ASSET, "utf8").replace(MARKER, () => scripts.join("\n"));
}

if (process.argv[1] === fileURLToPath(import.meta.url)) {
  const [out, ...files] = process.argv.slice(2);
  writeFileSync(
    out,
    makePage(files.map((file) => ({ name: basename(file), text: readFileSync(file, "utf8") }))),
  );
}
