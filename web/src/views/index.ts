/** The view of each kind of document. */
import type { Document } from "../documents";
import { h } from "../dom";
import { comparisonView } from "./comparison";
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
  comparison: (data) => comparisonView(data),
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

function tablesOf({ kind, data, name }: Document): HTMLElement | null {
  try {
    return genericView(data, kind, name);
  } catch {
    return null;
  }
}
