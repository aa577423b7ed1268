// Opens every page of a rendered site in the system's Chromium and checks what a reader relies on.
//
//   node check.mjs SITE [CHROMIUM]
//
// One line a page. Exit status 0: nothing found; 1: violations, listed after the pages; 2: bad usage.
import { readFileSync, readdirSync, statSync } from "node:fs";
import { createRequire } from "node:module";
import { basename, dirname, join, resolve } from "node:path";
import { fileURLToPath, pathToFileURL } from "node:url";
import { chromium } from "playwright-core";

const AXE = readFileSync(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");
const VIEWS = [
  { width: 1280, colorScheme: "light", open: false },
  { width: 390, colorScheme: "light", open: true },
  { width: 1280, colorScheme: "dark", open: true },
];
const MOST_STOPS = 80;

/** What the page itself can tell: links, ids, overflow, headings, resources, the cards under the plots. */
function inspect() {
  const name = (node) => `${node.localName}${node.id ? "#" + node.id : ""}${node.getAttribute("class") ? "." + node.getAttribute("class") : ""}`;
  const page = document.scrollingElement;
  const inScroller = (node) => node && node !== document.body && (getComputedStyle(node).overflowX !== "visible" || inScroller(node.parentElement));
  const wide = page.scrollWidth > page.clientWidth
    ? [...document.body.querySelectorAll("*")].filter((node) => node.getBoundingClientRect().right > page.clientWidth + 1 && !inScroller(node.parentElement))
    : [];
  return {
    title: document.title,
    ids: [...document.querySelectorAll("[id]")].map((node) => node.id),
    links: [...document.querySelectorAll("a[href], area[href]")].map((node) => new URL(node.getAttribute("href"), document.baseURI).href),
    resources: [...document.querySelectorAll("[src], [srcset], [poster], link[href], object[data], use[href], image[href]")]
      .flatMap((node) => ["src", "srcset", "poster", "data", "href"].map((key) => node.getAttribute(key)).filter(Boolean))
      .filter((value) => !value.startsWith("data:") && !value.startsWith("#")),
    headings: [...document.querySelectorAll("h1, h2, h3, h4, h5, h6")].map((node) => Number(node.localName[1])),
    overflow: page.scrollWidth > page.clientWidth ? `${page.scrollWidth} px at ${page.clientWidth}: ${wide.slice(0, 3).map(name).join(", ")}` : "",
    cards: [...document.querySelectorAll("figure.plot")].map((node) => getComputedStyle(node).backgroundColor),
    sideways: [...document.querySelectorAll(".d2-gates")].filter((node) => node.scrollWidth > node.clientWidth).length,
    stacked: [...document.querySelectorAll(".celltag_figures")].map((cell) => [...cell.querySelectorAll("figure.plot")].slice(0, 2))
      .filter(([one, two]) => Math.abs(one.getBoundingClientRect().top - two.getBoundingClientRect().top) > 1).length,
    broken: [...document.images].filter((image) => !image.complete || !image.naturalWidth).length,
  };
}

/** The element that has the focus: what it is, whether it can be seen, and whether it shows that it has the focus. */
function focused() {
  const node = document.activeElement;
  if (!node || node === document.body) return null;
  const box = node.getBoundingClientRect();
  const rings = [node, ...node.querySelectorAll("rect")].map((each) => getComputedStyle(each));
  return {
    what: `${node.localName} "${(node.getAttribute("aria-label") || node.textContent).trim().slice(0, 40)}"`,
    skip: node.localName === "a" && node.getAttribute("href") === "#main",
    seen: box.right > 0 && box.bottom > 0 && box.left < innerWidth && box.top < innerHeight,
    ring: rings.some((style, index) => (index === 0 ? style.outlineStyle !== "none" && parseFloat(style.outlineWidth) > 0 : parseFloat(style.strokeWidth) >= 3)),
  };
}

async function keyboard(page, report) {
  await page.keyboard.press("Tab");
  const first = await page.evaluate(focused);
  if (!first?.skip) report(`the first Tab does not reach the skip link but ${first?.what ?? "nothing"}`);
  else {
    if (!first.seen) report("the skip link cannot be seen when it has the focus");
    await page.keyboard.press("Enter");
    await page.waitForFunction(() => location.hash === "#main", null, { timeout: 5000 }).catch(() => report("the skip link does not lead to the content"));
  }
  for (let stop = 0; stop < MOST_STOPS; stop++) {
    await page.keyboard.press("Tab");
    const at = await page.evaluate(focused);
    if (!at || at.skip) break;
    if (!at.seen) report(`out of sight when it has the focus: ${at.what}`);
    if (!at.ring) report(`does not show that it has the focus: ${at.what}`);
  }
}

async function look(browser, file, view, report) {
  const { width, colorScheme, open } = view;
  const context = await browser.newContext({ viewport: { width, height: 900 }, colorScheme, offline: true });
  const page = await context.newPage();
  page.on("console", (message) => ["error", "warning"].includes(message.type()) && report(`console: ${message.text()}`));
  page.on("pageerror", (error) => report(`error: ${error.message}`));
  page.on("request", (request) => {
    const url = request.url();
    if (!url.startsWith("data:") && url.split("#")[0] !== pathToFileURL(file).href) report(`request: ${url}`);
  });
  await page.goto(pathToFileURL(file).href);
  if (open) await page.evaluate(() => document.querySelectorAll("details").forEach((node) => { node.open = true; }));
  const facts = await page.evaluate(inspect);
  for (const value of facts.resources) report(`not self-contained: ${value}`);
  if (width < 500 && facts.overflow) report(`the page scrolls sideways: ${facts.overflow}`);
  if (width < 500 && facts.sideways) report(`${facts.sideways} tables of gates scroll sideways`);
  if (width > 1200 && facts.stacked) report("figures of one cell stand below each other on a wide screen");
  if (facts.broken) report(`${facts.broken} pictures cannot be shown`);
  if (facts.cards.some((colour) => colour !== "rgb(255, 255, 255)")) report("a plot does not lie on a white card");
  if (facts.headings.filter((level) => level === 1).length !== 1) report("not exactly one first heading");
  facts.headings.forEach((level, index) => {
    if (index && level > facts.headings[index - 1] + 1) report(`heading ${index + 1} jumps from level ${facts.headings[index - 1]} to ${level}`);
  });
  await page.evaluate(AXE);
  const found = await page.evaluate(() => axe.run(document, { resultTypes: ["violations"] }));
  for (const violation of found.violations.filter(({ impact }) => ["serious", "critical"].includes(impact)))
    report(`axe ${violation.id} (${violation.impact}): ${violation.help}: ${violation.nodes.slice(0, 3).map((node) => node.html.slice(0, 120)).join(" | ")}`);
  await page.evaluate(() => scrollTo(0, 0));
  if (!open) await keyboard(page, report);
  await context.close();
  return facts;
}

function badLinks(folder, pages) {
  const found = [];
  for (const [file, facts] of pages) {
    for (const href of new Set(facts.links)) {
      const url = new URL(href);
      if (url.protocol !== "file:") {
        if (!["http:", "https:", "mailto:"].includes(url.protocol)) found.push(`${basename(file)}: a link is not a page: ${href}`);
        continue;
      }
      const target = fileURLToPath(new URL(url.pathname, "file://"));
      const there = pages.get(target);
      if (dirname(target) !== folder || !there) found.push(`${basename(file)}: broken link: ${href}`);
      else if (url.hash && !there.ids.includes(decodeURIComponent(url.hash.slice(1)))) found.push(`${basename(file)}: no such place: ${href}`);
    }
  }
  return found;
}

async function main([site, executablePath = "/usr/bin/chromium"]) {
  if (!site || !statSync(site, { throwIfNoEntry: false })?.isDirectory()) {
    console.error("usage: node check.mjs SITE [CHROMIUM]");
    return 2;
  }
  const folder = resolve(site);
  const files = readdirSync(folder).filter((name) => name.endsWith(".html")).sort();
  if (!files.length) {
    console.error(`no pages in ${folder}`);
    return 2;
  }
  const args = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking"];
  const browser = await chromium.launch({ executablePath, args });
  const pages = new Map();
  const violations = new Set();
  try {
    for (const name of files) {
      const before = violations.size;
      const seen = await Promise.all(VIEWS.map((view) => {
        const where = `${name} (${view.width} px, ${view.colorScheme}${view.open ? ", unfolded" : ""})`;
        return look(browser, join(folder, name), view, (text) => violations.add(`${where}: ${text}`));
      }));
      pages.set(join(folder, name), seen[0]);
      const facts = pages.get(join(folder, name));
      console.log(`${violations.size > before ? "bad " : "good"} ${name}: ${facts.links.length} links, ${facts.cards.length} plots, ${facts.headings.length} headings`);
    }
  } finally {
    await browser.close();
  }
  for (const text of badLinks(folder, pages)) violations.add(text);
  for (const text of [...violations].sort()) console.log(`- ${text}`);
  console.log(`${files.length} pages, ${violations.size} violations`);
  return violations.size ? 1 : 0;
}

process.exitCode = await main(process.argv.slice(2));
