import { createHash } from "node:crypto";
import { defineConfig } from "vite";
import { trimmedUPlot } from "./trim-uplot.js";

const MARKER = "<!--pagetax:documents-->";
/** The page without documents. A report is sent by mail, so the shell has to stay small. */
const BYTES_MAX = 120_000;

/** Returns the source that a content security policy allows an inline element by. */
const hash = (text) => `'sha256-${createHash("sha256").update(text).digest("base64")}'`;

/** Puts script and style into the page, with a policy that allows these two and nothing else. */
function singleFile() {
  return {
    name: "single-file",
    enforce: "post",
    generateBundle(_, bundle) {
      const files = Object.values(bundle);
      const text = (end) =>
        files
          .filter((file) => file.fileName.endsWith(end))
          .map((file) => file.code ?? file.source)
          .join("");
      // A closing tag inside a string would end the element.
      const script = text(".js").replaceAll("</script", "<\\/script");
      const style = text(".css").trim();
      const policy = `default-src 'none'; script-src ${hash(script)}; style-src ${hash(style)}; img-src data:; base-uri 'none'; form-action 'none'`;
      const page = files.find((file) => file.fileName === "index.html");
      const head = `<meta http-equiv="Content-Security-Policy" content="${policy}">\n<style>${style}</style>\n<script type="module">${script}</script>`;
      const html = page.source
        .replace(/\s*<script type="module"[^>]*><\/script>|\s*<link rel="stylesheet"[^>]*>/g, "")
        // A function, because a replacement text would interpret the dollar signs of the script.
        .replace('<meta charset="utf-8">', () => `<meta charset="utf-8">\n${head}`);
      if (html.split(MARKER).length !== 2) throw new Error(`the page must have ${MARKER} exactly once`);
      const size = Buffer.byteLength(html);
      if (size > BYTES_MAX) throw new Error(`the page has ${size} bytes, and may have ${BYTES_MAX}`);
      for (const file of files) delete bundle[file.fileName];
      this.emitFile({ type: "asset", fileName: "report.html", source: html });
      this.info(`report.html has ${size} bytes`);
    },
  };
}

export default defineConfig({
  plugins: [trimmedUPlot(), singleFile()],
  build: {
    // Browsers of 2024 have light-dark(); for older ones it would be rewritten, and would not follow the button.
    target: "esnext",
    outDir: "../crates/cli/assets",
    emptyOutDir: false,
    modulePreload: false,
    cssCodeSplit: false,
  },
});
