/** The page without a pointer. */
import assert from "node:assert/strict";
import test, { after } from "node:test";
import { close, document, open } from "./page.js";

after(close);

test("tabs, charts, tables and lines to paste are reached by keys", async () => {
  const { page, close } = await open([document("run-mmap3"), document("diagnose-names")]);
  const focused = () => page.evaluate(() => document.activeElement.textContent.slice(0, 40));
  await page.keyboard.press("Tab");
  assert.equal(await focused(), "run-mmap3.json");
  await page.keyboard.press("ArrowRight");
  assert.equal(await focused(), "diagnose-names.json");
  assert.equal(await page.locator("h1:visible").innerText(), "python3 names.py");
  await page.keyboard.press("End");
  assert.equal(await focused(), "Compare");
  await page.keyboard.press("Home");
  for (let presses = 0; presses < 10; presses++) {
    await page.keyboard.press("Tab");
    if (await page.evaluate(() => document.activeElement.classList.contains("chart"))) break;
  }
  await page.keyboard.press("ArrowRight");
  await page.keyboard.press("ArrowRight");
  const { columns } = JSON.parse(document("run-mmap3").text).series;
  const legend = await page.locator("figure .legend").first().innerText();
  assert.ok(legend.includes(String(columns.minor_fault_count[1]).replace(/\B(?=\d{3}$)/, " ")), legend);
  await page.keyboard.press("Tab");
  await page.keyboard.press("Space");
  assert.equal(await page.evaluate(() => document.activeElement.getAttribute("aria-pressed")), "false");
  await close();
});

test("a folded table is opened by keys", async () => {
  const { page, close } = await open([document("run-mmap3")]);
  await page.locator("summary").first().focus();
  await page.keyboard.press("Enter");
  await page.locator("figure details table").first().waitFor();
  await close();
});

test("a press copies the line to paste", async () => {
  const { page, close } = await open([document("diagnose-gather")]);
  const { verdict } = JSON.parse(document("diagnose-gather").text);
  await page.context().grantPermissions(["clipboard-read", "clipboard-write"]);
  await page.getByRole("button", { name: "Copy the lines for Shell" }).focus();
  await page.keyboard.press("Enter");
  await page.getByText(/^(Copied|Press Ctrl-C)$/).waitFor();
  const copied = await page.evaluate(() =>
    navigator.clipboard.readText().catch(() => getSelection().toString()),
  );
  assert.equal(copied, verdict.apply);
  await close();
});
