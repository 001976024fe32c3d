/** Cuts from uPlot what the page does not use: dates, other curves, its legend, synchronised charts, other scales. */

/** Returns a pattern of all text from one line to before another. */
const lines = (from, to) => new RegExp(`^${from}[^]*?(?=^${to})`, "m");

/** What is cut, and what takes its place. Each must be found: another version of uPlot needs other cuts. */
const CUTS = [
  [lines("uPlot\\.assign", "export \\{")],
  // Dates.
  [/FEAT_TIME( *)= true/, "FEAT_TIME$1= false"],
  [lines("\\tconst _tzDate", "\\tconst activeIdxs")],
  [lines("const subs = \\{", "//export const series")],
  [lines("const yyyy ", "function legendStroke")],
  [/isTime \? \(isStr\(sv\)[^]*?\) : sv \|\| numSeriesVal/, "sv || numSeriesVal"],
  [/isTime \? timeSeriesLabel : /, ""],
  [/\(isTime \? \(ms == 1[^]*?: numIncrs\)/, "numIncrs"],
  [/isTime && sc\.distr == 1 \? _timeAxisSplits : /, ""],
  [/isTime \? \(\s*\/\/ config array[^]*?\) : av \|\| numAxisVals/, "av || numAxisVals"],
  [/isTime \? snapTimeX : /, ""],
  // Scales that no chart has.
  [/sc\.distr == 4 +\? val =>[^]*?sc\.distr == 100 \? [^\n]*\n/, ""],
  [/sc\.distr == 4 \? \w+ : /g, ""],
  [/distr == 4 \? asinh\([^)]*\) : distr == 100 \? sc\.fwd\([^)]*\) : /g, ""],
  [/distr == 4 \? sinh\(sv, sc\.asinh\) :\s*distr == 100 \? sc\.bwd\(sv\) :/, ""],
  [/scale\.distr == 2/g, "false"],
  [/sc\.distr == 2 && dataLen > 0/, "false"],
  [/sc\.distr == 2 \? wholeIncrs : /, ""],
  [/xScaleDistr == 2/g, "false"],
  [lines("const xySeriesOpts", "const ySeriesOpts")],
  [/setDefaults2\(opts\.[^)]*\)/, "null"],
  [/mode == 1 \? setDefault\(([^)]*)\) : setDefault\([^)]*\)/, "setDefault($1)"],
  [/\bmode == 2/g, "false"],
  [/\bmode == 1/g, "true"],
  // The time is always horizontal.
  [/scaleX\.ori == 0/g, "true"],
  [/scaleX\.ori == 1/g, "false"],
  // The page has a legend of its own.
  [/\bshowLegend\b(?! =)/g, "false"],
  [/const showLegend[^\n]*/, ""],
  [/\bcursorFocus\b(?! =)/g, "false"],
  [/\bcursorOnePt\b(?! =)/g, "false"],
  [lines("\\tif \\(legend\\.live", "\\tif \\(false\\) \\{\n\t\tlegendTable")],
  // Charts that move together.
  [lines("\\tevents\\.mousedown", "\\tif \\(showCursor")],
  [lines("\\tconst seriesIdxMatcher", "\\tfunction destroy")],
  [/sync\.unsub\(self\);/, ""],
  [/_pub && pubSync\([^\n]*/, ""],
  [/\be != null/g, "true"],
  [/\bsrc != null/g, "false"],
  [/\bsrc == null/g, "true"],
  [/if \(syncKey != null\)/, "if (false)"],
  [/pubSync\(\w+, self, [^\n]*/g, ";"],
  [/, syncOpts\.setSeries/g, ""],
  [/_pub && syncOpts\.setSeries/, "false"],
  // What may be changed of a chart that is drawn.
  [
    /self\.(addSeries|delSeries|addBand|setBand|delBand|setSelect|posToIdx|posToVal|valToIdx|setLegend|setData|destroy|setScale) += [^;]*;/g,
    "",
  ],
];

/** Makes the plugin of the build. */
export function trimmedUPlot() {
  return {
    name: "trimmed-uplot",
    transform(code, id) {
      if (!id.endsWith("uPlot.esm.js")) return null;
      for (const [pattern, instead = ""] of CUTS) {
        const cut = code.replace(pattern, instead);
        if (cut === code) throw new Error(`uPlot has no ${pattern}`);
        code = cut;
      }
      return { code, map: null };
    },
  };
}
