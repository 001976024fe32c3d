//! From a file's figures to rows: drafts, what they need, and what came out.

use super::expression::{Expression, Values};
use super::figure::Figure;
use super::published::{Band, Check, Column, Published, Setup, Status, TableSweep};
use super::runs::{self, FigureValues};
use super::{Compared, OnProgress, ReproduceError, Row, SEEDS_MIN, Spread, Verdict};
use std::collections::{BTreeMap, BTreeSet};

/// A row before it is simulated.
struct Draft {
    /// Sweep, and key of the row; none for single figures.
    of: Option<(String, f64)>,
    key: BTreeMap<String, f64>,
    figure: String,
    published: f64,
    expression: Option<Expression>,
    /// The accepted ratios to the published figure.
    tolerance: Option<[f64; 2]>,
    status: Status,
    why: String,
    listed: bool,
}

/// Runs what the file needs and compares.
pub(super) fn compare(
    name: &str,
    published: &Published,
    seeds: u64,
    on_progress: OnProgress<'_>,
) -> Result<Compared, ReproduceError> {
    let drafts = drafts(published)?;
    let mut wanted: BTreeMap<String, BTreeSet<Figure>> = BTreeMap::new();
    let expressions = drafts.iter().filter_map(|draft| draft.expression.as_ref());
    for (run, figure) in expressions.flat_map(Expression::terms) {
        wanted.entry(run.into()).or_default().insert(figure.clone());
    }
    let setups = published.setups()?;
    let figures = runs::run(&setups, &wanted, seeds, on_progress)?;
    let mut done = Vec::new();
    for draft in drafts {
        let least_of = least_of(&draft, &setups);
        let row = simulate(&draft, &figures, &done, seeds >= SEEDS_MIN);
        done.push((draft, Row { least_of, ..row }));
    }
    let listed = done.into_iter().filter(|(draft, _)| draft.listed).map(|(_, row)| row);
    let Published { title, source, notes, .. } = published.clone();
    Ok(Compared { name: name.into(), title, source, notes, rows: listed.collect() })
}

/// Returns the largest group of runs of which only the fastest counts, among the runs of a row.
fn least_of(draft: &Draft, setups: &BTreeMap<String, Setup>) -> u64 {
    let terms = draft.expression.iter().flat_map(Expression::terms);
    let least = terms.filter_map(|(run, _)| setups.get(run)).map(|setup| setup.least_of.get());
    least.max().unwrap_or(1)
}

/// Rows of sweeps first, as checks may look back at them.
fn drafts(published: &Published) -> Result<Vec<Draft>, ReproduceError> {
    let mut drafts = Vec::new();
    for sweep in &published.sweep {
        for (key, cells) in sweep.rows()? {
            for column in &sweep.column {
                // A figure may be the sum of several columns of the table.
                let headings = column.heading.as_ref().unwrap_or(&column.figure).split(" + ");
                let cell: Option<f64> = headings.map(|h| cells.get(h).copied()).sum();
                if let Some(cell) = cell {
                    drafts.push(row_of(sweep, column, key, cell));
                }
            }
        }
    }
    drafts.extend(published.check.iter().map(single));
    Ok(drafts)
}

fn row_of(sweep: &TableSweep, column: &Column, key: f64, published: f64) -> Draft {
    let band = column.tolerance.iter().find(|band| (band.from..=band.to).contains(&key));
    let run = sweep.run_name(key);
    let expression = Expression::parse(&column.value).ok();
    Draft {
        of: Some((sweep.name.clone(), key)),
        key: BTreeMap::from([(sweep.key.clone(), key)]),
        figure: column.figure.clone(),
        published,
        expression: expression.map(|expression| expression.for_row(&run, key)),
        tolerance: band.and_then(|band| ratios(band, published)),
        status: column.status,
        why: String::new(),
        listed: sweep.listed,
    }
}

/// Returns a band's tolerance as ratios.
fn ratios(band: &Band, published: f64) -> Option<[f64; 2]> {
    let difference = band.difference.map(|ends| ends.map(|end| (published + end) / published));
    band.ratio.or(difference)
}

fn single(check: &Check) -> Draft {
    let range = check.range.map(|ends| ends.map(|end| end / check.published));
    Draft {
        of: None,
        key: BTreeMap::new(),
        figure: check.figure.clone(),
        published: check.published,
        expression: check.value.as_deref().and_then(|text| Expression::parse(text).ok()),
        tolerance: check.ratio.or(range),
        status: check.status,
        why: check.why.clone(),
        listed: true,
    }
}

/// Returns the verdict on a figure.
fn simulate(draft: &Draft, figures: &FigureValues, done: &[(Draft, Row)], asserts: bool) -> Row {
    let values = draft.expression.as_ref().map(|expression| values(expression, figures, done));
    let value_count = match &values {
        Some(Ok(values)) if draft.expression.iter().any(|e| !e.terms().is_empty()) => values.len(),
        _ => 0,
    };
    let spread = values.map(|values| {
        values.and_then(|values| Spread::of(&values).ok_or_else(|| "is no finite number".into()))
    });
    let (simulated, why) = match spread {
        None => (None, draft.why.clone()),
        Some(Ok(spread)) => (Some(spread), draft.why.clone()),
        Some(Err(why)) => (None, why),
    };
    let ratio = simulated.map(|spread| spread.median / draft.published).filter(|r| r.is_finite());
    let is_within =
        |[low, high]: [f64; 2]| ratio.is_some_and(|ratio| (low..=high).contains(&ratio));
    let verdict = match (draft.status, draft.tolerance) {
        (Status::NotReproducible, _) => Verdict::NotReproducible,
        _ if simulated.is_none() => Verdict::Miss,
        (Status::Derived, _) => Verdict::Derived,
        (_, Some(tolerance)) if asserts && is_within(tolerance) => Verdict::Ok,
        (_, Some(_)) if asserts => Verdict::Miss,
        _ => Verdict::Reported,
    };
    Row {
        key: draft.key.clone(),
        figure: draft.figure.clone(),
        published: draft.published,
        simulated,
        value_count,
        least_of: 1,
        ratio,
        tolerance: draft.tolerance,
        ok: verdict != Verdict::Miss,
        verdict,
        status: draft.status,
        why,
    }
}

/// Returns the values of an expression, as many as each of its figures has.
fn values(
    expression: &Expression,
    figures: &FigureValues,
    done: &[(Draft, Row)],
) -> Result<Vec<f64>, String> {
    let mut seeds = None;
    for (run, figure) in expression.terms() {
        let values = figures.get(run).and_then(|figures| figures.get(figure));
        let values = values.ok_or_else(|| format!("{run} has not been run"))?;
        if let Some(why) = values.iter().find_map(|value| value.as_ref().err()) {
            return Err(format!("{run}.{figure}: {why}"));
        }
        seeds = Some(seeds.unwrap_or(usize::MAX).min(values.len()));
    }
    let value = |seed| expression.value(&AtSeed { seed, figures, done });
    Ok((0..seeds.unwrap_or(1)).map(value).collect())
}

/// FigureValues of one seed, or of the fastest run of one group of seeds.
struct AtSeed<'a> {
    seed: usize,
    figures: &'a FigureValues,
    done: &'a [(Draft, Row)],
}

impl Values for AtSeed<'_> {
    fn term(&self, run: &str, figure: &Figure) -> f64 {
        let values = self.figures.get(run).and_then(|figures| figures.get(figure));
        let value = values.and_then(|values| values.get(self.seed));
        value.and_then(|value| value.as_ref().ok()).copied().unwrap_or(f64::NAN)
    }

    /// Evaluates over the medians of the rows.
    fn rms(&self, sweep: &str, column: &str, from: f64, to: f64) -> f64 {
        let is_wanted = |draft: &Draft| {
            let (name, key) = draft.of.as_ref().map_or(("", 0.0), |(name, key)| (name, *key));
            name == sweep && draft.figure == column && (from..=to).contains(&key)
        };
        let rows = self.done.iter().filter(|(draft, _)| is_wanted(draft));
        let logs: Vec<f64> = rows.map(|(_, row)| row.ratio.unwrap_or(f64::NAN).ln()).collect();
        (logs.iter().map(|log| log * log).sum::<f64>() / logs.len() as f64).sqrt().exp()
    }
}
