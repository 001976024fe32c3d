/** Opens pages in Chromium as a reader does: from a file, without a network. */
import assert from "node:assert/strict";
import { mkdtempSync, readdirSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { createRequire } from "node:module";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { pathToFileURL } from "node:url";
import { chromium } from "playwright-core";
import { makePage } from "../make-page.js";

const AXE = readFileSync(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");
const DOCUMENTS = new URL("documents/", import.meta.url);
const EXAMPLES = new URL("../../docs/schema/examples/", import.meta.url);

const folder = mkdtempSync(join(tmpdir(), "pagetax-page-"));
const browser = await chromium.launch({ executablePath: "/usr/bin/chromium", args: ["--no-sandbox"] });
let made = 0;

/** Closes the browser; to be called when a file's tests are over. */
export async function close() {
  await browser.close();
  rmSync(folder, { recursive: true });
}

/** The kinds of documents that have an example of the schema: all. */
export const kinds = readdirSync(EXAMPLES).map((file) => file.replace(".json", ""));

/** Returns a checked-in document, or an example of the schema. */
export function document(name) {
  const file = new URL(`${name}.json`, DOCUMENTS);
  try {
    return { name: `${name}.json`, text: readFileSync(file, "utf8") };
  } catch {
    return { name: `${name}.json`, text: readFileSync(new URL(`${name}.json`, EXAMPLES), "utf8") };
  }
}

/** Returns what the terminal showed of a checked-in document. */
export const terminal = (name) => readFileSync(new URL(`${name}.txt`, DOCUMENTS), "utf8");

/** Returns true if the page shows something, and each chart that is visible has its canvas. */
function isReady() {
  const charts = [...document.querySelectorAll(".chart")].filter((chart) => chart.clientWidth > 0);
  return (
    document.querySelector("main > *, .refusal") && charts.every((chart) => chart.querySelector("canvas"))
  );
}

/** Opens a page with these documents. `faults` collects console errors, exceptions and requests. */
export async function open(documents, { theme = "light", html } = {}) {
  const context = await browser.newContext({ colorScheme: theme, viewport: { width: 1240, height: 900 } });
  const page = await context.newPage();
  const file = join(folder, `${made++}.html`);
  writeFileSync(file, html ?? makePage(documents));
  const faults = [];
  page.on(
    "console",
    (message) => ["error", "warning"].includes(message.type()) && faults.push(message.text()),
  );
  page.on("pageerror", (error) => faults.push(String(error)));
  page.on(
    "request",
    (request) =>
      /^(data|blob):/.test(request.url()) || request.isNavigationRequest() || faults.push(request.url()),
  );
  page.on("dialog", (dialog) => faults.push(`dialog ${dialog.message()}`) && dialog.dismiss());
  await page.goto(pathToFileURL(file).href);
  await page.waitForFunction(isReady);
  return { page, faults, close: () => context.close() };
}

/** Fails on serious and critical faults of accessibility. */
export async function checkAccess(page, what) {
  await page.evaluate(AXE);
  const violations = await page.evaluate(async () => {
    const { violations } = await axe.run();
    return violations
      .filter(({ impact }) => impact === "serious" || impact === "critical")
      .map(
        ({ id, nodes }) =>
          `${id}: ${nodes
            .slice(0, 3)
            .map(({ html }) => html)
            .join(" | ")}`,
      );
  });
  assert.deepEqual(violations, [], what);
}

/** Returns the cells of the table with this caption, row by row, the heading first. */
export function cells(page, caption) {
  return page.evaluate((caption) => {
    const isShown = (table) => table.checkVisibility() && table.caption.textContent.startsWith(caption);
    const table = [...document.querySelectorAll("table")].find(isShown);
    return table && [...table.rows].map((row) => [...row.cells].map((cell) => cell.innerText.trim()));
  }, caption);
}

/** Opens all folded tables. */
export async function unfold(page) {
  await page.evaluate(() => document.querySelectorAll("details").forEach((details) => (details.open = true)));
  await page.waitForTimeout(100);
}

/** Formats digits in groups of three, as the terminal does. */
export const count = (value) => String(value).replace(/\B(?=(\d{3})+$)/g, " ");
