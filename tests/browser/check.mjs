// Opens pages in Chromium at each width, light and dark, and prints what a reader would stumble on.
//
//   node check.mjs CHROMIUM SCREENSHOTS PAGE...
//
// SCREENSHOTS is a folder, or - for none. Prints a JSON list with an entry for each view of a page:
// console errors, requests that leave the machine, axe-core's serious faults, elements that reach
// beyond the window, and what the first table's first column of numbers holds as it is sorted.
import { createRequire } from "node:module";
import { readFile } from "node:fs/promises";
import { basename, dirname, join, resolve } from "node:path";
import { pathToFileURL } from "node:url";
import puppeteer from "puppeteer-core";

const [executablePath, screenshots, ...paths] = process.argv.slice(2);
const VIEWS = [1280, 400].flatMap((width) => ["light", "dark"].map((scheme) => ({ width, scheme })));
const axe = await readFile(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf-8");

async function look(browser, path, { width, scheme }) {
  const page = await browser.newPage();
  const errors = [];
  const requests = [];
  page.on("console", (message) => message.type() === "error" && errors.push(message.text()));
  page.on("pageerror", (error) => errors.push(String(error)));
  page.on("request", (request) => requests.push(request.url()));
  await page.setViewport({ width, height: 900 });
  await page.emulateMediaFeatures([{ name: "prefers-color-scheme", value: scheme }]);
  const url = pathToFileURL(resolve(path)).href;
  await page.goto(url, { waitUntil: "networkidle0" });
  if (screenshots !== "-") await shoot(page, path, width, scheme);
  const overflowing = await page.evaluate(tooWide);
  await page.evaluate(axe);
  const found = await page.evaluate(() => window.axe.run(document, { resultTypes: ["violations"] }));
  const sorted = (await page.$("thead button")) ? await sort(page) : null;
  await page.close();
  return {
    page: path, width, scheme, errors, overflowing, sorted,
    requests: requests.filter((each) => each !== url),
    faults: found.violations.filter(serious).map(summary),
  };
}

async function shoot(page, path, width, scheme) {
  const name = `${basename(dirname(resolve(path)))}-${basename(path, ".html")}-${width}-${scheme}.png`;
  await page.screenshot({ path: join(screenshots, name), fullPage: true });
}

// Elements outside of scrolling regions that are cut off or make the whole page scroll sideways.
function tooWide() {
  const inside = (element) => element.closest(".scroll, pre, details:not([open])") === null;
  return [...document.querySelectorAll("body *")]
    .filter((element) => inside(element) && element.getBoundingClientRect().right > window.innerWidth + 1)
    .map((element) => `${element.tagName} ${element.textContent.trim().slice(0, 60)}`);
}

// With the keyboard: Enter on the heading of the first column of numbers, three times.
async function sort(page) {
  const column = await page.evaluate(() => {
    const heads = [...document.querySelectorAll("table")].find((each) => each.querySelector("thead button")).tHead.rows[0].cells;
    const at = [...heads].findIndex((head) => !head.classList.contains("text") && !["T", "Batch"].includes(head.textContent));
    heads[at].querySelector("button").focus();
    return at;
  });
  const states = [];
  for (let press = 0; press < 4; press += 1) {
    if (press) await page.keyboard.press("Enter");
    states.push(await page.evaluate((at) => {
      const table = [...document.querySelectorAll("table")].find((each) => each.querySelector("thead button"));
      return {
        order: table.tHead.rows[0].cells[at].getAttribute("aria-sort"),
        entries: [...table.tBodies[0].rows].map((row) => row.cells[at].firstChild.textContent.trim()),
      };
    }, column));
  }
  return states;
}

const serious = (fault) => ["serious", "critical"].includes(fault.impact);
const summary = (fault) => `${fault.id}: ${fault.nodes.slice(0, 3).map((node) => node.html.slice(0, 160)).join(" | ")}`;

const browser = await puppeteer.launch({ executablePath, args: ["--no-sandbox", "--disable-gpu"] });
try {
  const results = [];
  for (const path of paths) for (const view of VIEWS) results.push(await look(browser, path, view));
  console.log(JSON.stringify(results, null, 1));
} finally {
  await browser.close();
}
