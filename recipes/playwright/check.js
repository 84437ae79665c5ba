// Opens the page of the guest in its browser, takes a screenshot, and prints what it found.
const { chromium } = require("playwright-core");
const { readFileSync } = require("fs");

const MILLISECONDS = 600_000;
const SCREENSHOT = "/tmp/page.png";

async function main() {
  const browser = await chromium.connectOverCDP("http://127.0.0.1:9222", { timeout: MILLISECONDS });
  const context = await browser.newContext({ viewport: { width: 640, height: 360 } });
  context.setDefaultTimeout(MILLISECONDS);
  const page = await context.newPage();
  await page.goto("http://127.0.0.1:8080/", { timeout: MILLISECONDS });
  const text = await page.textContent("#sum");
  await page.screenshot({ path: SCREENSHOT, timeout: MILLISECONDS });
  const title = await page.title();
  await context.close();
  await browser.close();
  const png = readFileSync(SCREENSHOT);
  if (png.toString("latin1", 1, 4) !== "PNG") throw new Error("the screenshot is not a PNG");
  console.log(`${title}: ${text}, ${png.readUInt32BE(16)} x ${png.readUInt32BE(20)} PNG`);
}

main().catch((error) => {
  console.error(error);
  process.exit(1);
});
