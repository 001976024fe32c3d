/** The view of each kind of document. */
import { compare, refusal } from "../compare";
import type { Document } from "../documents";
import { h } from "../dom";
import { billsView, billView } from "./bill";
import { comparisonsView, comparisonView } from "./comparison";
import { diagnosisView } from "./diagnosis";
import { genericView } from "./generic";
import { calibrationView, doctorView } from "./machine";
import { missCurveView } from "./misscurve";
import { article } from "./parts";
import { hugePageCausesView, pageMapsView, pageSizeChangeView } from "./processes";
import { reproductionView } from "./reproduction";
import { runView } from "./run";
import { runsView } from "./runs";
import { trapstatView } from "./trapstat";
import { whatIfView } from "./whatif";

const VIEWS: Record<string, (data: any) => HTMLElement> = {
  diagnosis: diagnosisView,
  run: runView,
  runs: runsView,
  bill: billView,
  comparison: comparisonView,
  comparisons: comparisonsView,
  misscurve: missCurveView,
  reproduction: reproductionView,
  trapstat: trapstatView,
  whatif: whatIfView,
  page_maps: pageMapsView,
  huge_page_causes: hugePageCausesView,
  page_size_change: pageSizeChangeView,
  doctor: doctorView,
  calibration: calibrationView,
};

/** Makes the view of a document. One that breaks its schema is shown as tables, with a sentence. */
export function viewOf(document: Document): HTMLElement {
  const { kind, data, name } = document;
  const view = Object.hasOwn(VIEWS, kind) ? VIEWS[kind] : undefined;
  try {
    return view ? view(data) : genericView(data, kind, name);
  } catch (error) {
    return article(
      h(
        "p",
        { class: "refusal", role: "alert" },
        `${name} does not follow the schema of ${kind} (${error}). `,
        "Its values are shown as they are. Write it again with this version of pagetax.",
      ),
      view && tablesOf(document),
    );
  }
}

/** Makes the view of two documents beside each other, or a sentence that says why there is none. */
export function viewOfBoth(first: Document, second: Document): HTMLElement {
  const refused = (sentence: string) => h("p", { class: "refusal", role: "alert" }, sentence);
  const why = refusal(first, second);
  if (why) return refused(why);
  try {
    if (first.kind === "bill") return billsView(first, second);
    const comparison = compare(first, second);
    return typeof comparison === "string" ? refused(comparison) : comparisonView(comparison);
  } catch (error) {
    return refused(
      `A document does not follow the schema of ${first.kind} (${error}). Write it again with this version of pagetax.`,
    );
  }
}

function tablesOf({ kind, data, name }: Document): HTMLElement | null {
  try {
    return genericView(data, kind, name);
  } catch {
    return null;
  }
}
