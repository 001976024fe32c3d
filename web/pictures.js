/** Makes the pictures of the documentation, docs/images/report-*.png. */
import { document, open, close } from "./test/page.js";

const PICTURES = [
  { name: "diagnosis", of: "diagnose-names", theme: "light", height: 1240 },
  { name: "run", of: "run-mmap3", theme: "dark", height: 1240 },
  { name: "mmap3", of: "runs-beside", theme: "light", height: 1420, at: ".beside" },
  { name: "reproduction", of: "reproduce-sun-4", theme: "light", height: 1000 },
  { name: "misscurve", of: "misscurve-sort", theme: "dark", height: 760 },
];

for (const { name, of, theme, height, at } of PICTURES) {
  const opened = await open([document(of)], { theme });
  await opened.page.setViewportSize({ width: 1240, height });
  if (at)
    await opened.page
      .locator(at)
      .first()
      .evaluate((element) => element.scrollIntoView());
  await opened.page.waitForTimeout(500);
  const path = new URL(`../docs/images/report-${name}.png`, import.meta.url).pathname;
  await opened.page.screenshot({ path });
  await opened.close();
}
await close();
