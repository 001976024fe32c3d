/** Each kind of document is drawn in light and dark, without an error, a request or a barrier. */
import assert from "node:assert/strict";
import test, { after } from "node:test";
import { checkAccess, close, document, kinds, open, unfold } from "./page.js";

after(close);

/** The documents with the number of charts on a canvas. Other examples of the schema have none. */
const CHARTS = {
  ...Object.fromEntries(kinds.map((kind) => [kind, 0])),
  "diagnose-names": 0,
  "run-mmap3": 7,
  "run-host": 4,
  runs: 1,
  "runs-sweep": 2,
  "compare-size": 0,
  "compare-sizes": 0,
  "bill-after": 0,
  "reproduce-sun-4": 7,
  misscurve: 1,
  "misscurve-sort": 2,
  "trapstat-gather": 0,
  "runs-beside": 6,
  "trapstat-sort": 0,
  "whatif-sort": 0,
  "pmap-bash": 0,
};

/** Tells for each canvas whether it has a line. Text and grid are gray; a line is coloured. */
function areDrawn(canvases) {
  const isDrawn = (canvas) => {
    const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
    let coloured = 0;
    for (let at = 0; at < data.length; at += 4) {
      const [red, green, blue, alpha] = data.subarray(at, at + 4);
      if (alpha > 100 && Math.max(red, green, blue) - Math.min(red, green, blue) > 40) coloured++;
    }
    return coloured > 50;
  };
  return canvases.map(isDrawn);
}

for (const theme of ["light", "dark"]) {
  for (const [name, charts] of Object.entries(CHARTS)) {
    test(`${name} in ${theme}`, async () => {
      const { page, faults, close } = await open([document(name)], { theme });
      assert.equal(await page.locator(".refusal").count(), 0);
      assert.ok((await page.locator("table").count()) > 0, "a document has at least one table");
      const drawn = await page.locator("canvas").evaluateAll(areDrawn);
      assert.ok(drawn.length >= charts, `${drawn.length} charts`);
      assert.ok(drawn.every(Boolean), "each chart has pixels of its lines");
      await checkAccess(page, name);
      await unfold(page);
      await checkAccess(page, `${name}, unfolded`);
      assert.deepEqual(faults, []);
      await close();
    });
  }
}

for (const theme of ["light", "dark"]) {
  for (const [first, second] of [
    ["size-4M", "size-64M"],
    ["bill-before", "bill-after"],
  ]) {
    test(`${first} beside ${second} in ${theme}`, async () => {
      const { page, faults, close } = await open([document(first), document(second)], { theme });
      await page.getByRole("tab", { name: "Compare" }).click();
      assert.equal(await page.locator(".refusal").count(), 0);
      await checkAccess(page, `${first}, ${second}`);
      assert.deepEqual(faults, []);
      await close();
    });
  }
}

test("the button switches the theme, and charts follow", async () => {
  const { page, faults, close } = await open([document("run-mmap3")]);
  const pixels = () =>
    page
      .locator("canvas")
      .first()
      .evaluate((canvas) => canvas.toDataURL());
  const before = await pixels();
  await page.getByRole("button", { name: "Dark" }).click();
  await page.waitForTimeout(100);
  assert.notEqual(await pixels(), before);
  assert.equal(await page.evaluate(() => getComputedStyle(document.documentElement).colorScheme), "dark");
  assert.deepEqual(faults, []);
  await close();
});

test("paper has light charts, and the tables that the reader opened", async () => {
  const { page, close } = await open([document("run-mmap3")], { theme: "dark" });
  const pixels = () =>
    page
      .locator("canvas")
      .first()
      .evaluate((canvas) => canvas.toDataURL());
  const before = await pixels();
  await page.evaluate(() => dispatchEvent(new Event("beforeprint")));
  await page.waitForTimeout(50);
  assert.notEqual(await pixels(), before);
  await page.evaluate(() => dispatchEvent(new Event("afterprint")));
  await page.waitForTimeout(50);
  assert.equal(await pixels(), before);
  await page.emulateMedia({ media: "print" });
  assert.equal(await page.locator("summary:visible").count(), 0);
  await close();
});

test("a narrow screen has no horizontal scroll bar", async () => {
  for (const name of ["diagnose-names", "run-mmap3", "reproduce-sun-4", "compare-sizes", "bill-after"]) {
    const { page, close } = await open([document(name)]);
    await page.setViewportSize({ width: 380, height: 800 });
    await page.waitForTimeout(100);
    assert.ok((await page.evaluate(() => document.documentElement.scrollWidth)) <= 380, name);
    await close();
  }
});
