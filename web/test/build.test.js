/** The checked-in page is what the sources build, small, and closed by its policy. */
import assert from "node:assert/strict";
import { createHash } from "node:crypto";
import { mkdtempSync, readFileSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import test from "node:test";
import { build } from "vite";

const asset = readFileSync(new URL("../../crates/cli/assets/report.html", import.meta.url), "utf8");

test("two builds give the checked-in bytes", async (context) => {
  for (let nth = 0; nth < 2; nth++) {
    const outDir = mkdtempSync(join(tmpdir(), "pagetax-build-"));
    await build({ root: new URL("..", import.meta.url).pathname, logLevel: "warn", build: { outDir } });
    assert.ok(
      readFileSync(join(outDir, "report.html"), "utf8") === asset,
      "run npm run build, and commit the page",
    );
    rmSync(outDir, { recursive: true });
  }
  context.diagnostic(`the page without documents has ${Buffer.byteLength(asset)} bytes`);
});

test("the policy names script and style by their hashes, and nothing else", () => {
  const policy = /Content-Security-Policy" content="([^"]*)"/.exec(asset)[1];
  const hash = (tag) => {
    const [, text] = new RegExp(`<${tag}[^>]*>(.*?)</${tag}>`, "s").exec(asset);
    return `'sha256-${createHash("sha256").update(text).digest("base64")}'`;
  };
  assert.equal(
    policy,
    `default-src 'none'; script-src ${hash("script")}; style-src ${hash("style")}; img-src data:; base-uri 'none'; form-action 'none'`,
  );
});

test("the marker is there once, at the end of the body", () => {
  assert.equal(asset.split("<!--pagetax:documents-->").length, 2);
  assert.match(asset, /<!--pagetax:documents-->\s*<\/body>/);
});
