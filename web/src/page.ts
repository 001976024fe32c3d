/** The page around the views: tabs of documents, files to add, comparison. */
import { patterns } from "./charts/strip";
import { canCompare } from "./compare";
import { Refusal, fromFile, type Document } from "./documents";
import { button, h } from "./dom";
import { themeButton } from "./theme";
import { viewOf, viewOfBoth } from "./views";

const documents: Document[] = [];
const tabs = h("div", { role: "tablist", "aria-label": "Documents" });
const messages = h("div", { class: "messages", "aria-live": "polite" });
const panels = h("main", {});

/** Shows the page with these documents. */
export function showPage(found: (Document | Refusal)[]): void {
  const files = filePicker();
  const header = h(
    "header",
    { class: "page" },
    h("span", { class: "name" }, "pagetax"),
    tabs,
    h("div", { class: "actions" }, files.button, themeButton()),
  );
  document.body.append(patterns(), header, messages, panels, files.input);
  document.body.addEventListener("dragover", (event) => event.preventDefault());
  document.body.addEventListener("drop", (event) => {
    event.preventDefault();
    void addFiles([...(event.dataTransfer?.files ?? [])]);
  });
  tabs.addEventListener("keydown", moveTabs);
  add(found);
  if (documents.length === 0) panels.append(dropArea(files.input));
}

function filePicker() {
  const input = h("input", {
    type: "file",
    multiple: true,
    accept: ".json,.html",
    hidden: true,
    "aria-label": "Files to add",
  });
  input.addEventListener("change", async () => {
    await addFiles([...(input.files ?? [])]);
    input.value = "";
  });
  return { input, button: button("Add a file", () => input.click()) };
}

function dropArea(input: HTMLInputElement): HTMLElement {
  return h(
    "section",
    { class: "drop" },
    h("h1", {}, "Drop a report here"),
    h(
      "p",
      {},
      "A document of pagetax (JSON), or a page that pagetax made. A second one is compared with the first. Nothing leaves this page.",
    ),
    button("Choose files", () => input.click()),
  );
}

async function addFiles(files: File[]): Promise<void> {
  const had = documents.length;
  messages.replaceChildren();
  for (const file of files) add(await fromFile(file));
  if (had > 0 && documents.length > had) showComparison(documents[0]!, documents.at(-1)!);
}

function add(found: (Document | Refusal)[]): void {
  const had = documents.length;
  for (const each of found) {
    if (each instanceof Refusal) messages.append(h("p", { class: "refusal", role: "alert" }, each.message));
    else documents.push(each);
  }
  if (documents.length === had) return;
  panels.querySelector(".drop")?.remove();
  documents.slice(had).forEach((document) => addTab(document.name, () => documentPanel(document)));
  if (documents.length > 1 && had <= 1) addTab("Compare", comparisonPanel);
  tabs.hidden = documents.length < 2;
  if (had === 0) select(tabs.children[0] as HTMLElement);
}

/** Adds a tab. Its panel is built when it is first selected. */
function addTab(name: string, build: () => HTMLElement): void {
  const id = `tab-${tabs.children.length}`;
  const tab = button(name, () => select(tab), {
    role: "tab",
    id,
    "aria-selected": "false",
    "aria-controls": `${id}-panel`,
    tabindex: -1,
  });
  const panel = h("div", { role: "tabpanel", id: `${id}-panel`, "aria-labelledby": id, hidden: true });
  tab.addEventListener("select-tab", () => panel.childElementCount > 0 || panel.append(build()));
  if (name === "Compare") tab.classList.add("compare");
  const compareTab = tabs.querySelector(".compare");
  tabs.insertBefore(tab, compareTab);
  panels.append(panel);
}

function select(selected: HTMLElement): void {
  for (const tab of tabs.children as Iterable<HTMLElement>) {
    const isSelected = tab === selected;
    tab.setAttribute("aria-selected", String(isSelected));
    tab.tabIndex = isSelected ? 0 : -1;
    document.getElementById(`${tab.id}-panel`)!.hidden = !isSelected;
  }
  selected.dispatchEvent(new Event("select-tab"));
  document.title = `${selected.textContent} – pagetax`;
}

/** Moves between tabs by arrow keys, as in other tab lists. */
function moveTabs(event: KeyboardEvent): void {
  const all = [...tabs.children] as HTMLElement[];
  const at = all.indexOf(document.activeElement as HTMLElement);
  const to = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: all.length - 1 }[event.key];
  const tab = to === undefined ? undefined : all.at(to % all.length);
  if (!tab) return;
  event.preventDefault();
  select(tab);
  tab.focus();
}

function documentPanel(document: Document): HTMLElement {
  const view = viewOf(document);
  view.append(
    h(
      "p",
      { class: "save" },
      button("Save the JSON", () => save(document)),
    ),
  );
  return view;
}

/** Saves the document as pagetax wrote it, byte for byte. */
function save({ name, text }: Document): void {
  const url = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  h("a", { href: url, download: name.replace(/(\.json|\.html)?$/, ".json") }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

let chosen: [Document, Document] | null = null;

function showComparison(first: Document, second: Document): void {
  chosen = [first, second];
  const tab = tabs.querySelector<HTMLElement>(".compare")!;
  document.getElementById(`${tab.id}-panel`)!.replaceChildren();
  select(tab);
}

/** Makes the choice of two documents with the comparison below. */
function comparisonPanel(): HTMLElement {
  const comparable = documents.filter(({ kind }) => canCompare(kind));
  let [first, second] = chosen ?? [comparable[0] ?? documents[0]!, comparable[1] ?? documents[1]!];
  const result = h("div", {});
  const update = () => result.replaceChildren(viewOfBoth(first, second));
  update();
  return h(
    "div",
    {},
    h(
      "div",
      { class: "choose" },
      choice("First", first, (document) => ((first = document), update())),
      choice("Second", second, (document) => ((second = document), update())),
    ),
    result,
  );
}

function choice(label: string, selected: Document, change: (document: Document) => void): HTMLElement {
  const options = documents.map((document, nth) =>
    h("option", { value: nth, selected: document === selected }, document.name),
  );
  const element = h("select", {}, ...options);
  element.addEventListener("change", () => change(documents[Number(element.value)]!));
  return h("label", {}, `${label} `, element);
}
