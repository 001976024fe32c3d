//! Charts made of characters: for terminals of 80 columns and for files, without colour, with their scales.

use super::text;
use pagetax_core::counter::{Unit, counter};
use pagetax_core::report::{Latency, ReportPhase, Run, Series};
use pagetax_core::units::Nanos;
use std::collections::BTreeMap;
use std::ops::Range;

/// The columns of a chart.
const COLUMNS: usize = 44;
/// From 0 to the largest value. Only 0 has the first.
const LEVELS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
const MISSING: char = '·';
/// The rows of a curve.
const ROWS: usize = 12;

/// The charts of a series, as the report on network memory of 2003 drew them, with what belongs in each.
const GRAPHS: [(&str, &[&str]); 3] = [
    ("Faults", &["minor_fault_count", "major_fault_count", "cow_fault_count"]),
    ("Paging", &["page_in_count", "page_out_count", "swap_in_count", "swap_out_count"]),
    ("Latency", &["latency"]),
];

/// Renders values as bars from 0 to the largest one, in at most so many columns. Values that share a column
/// show the largest of them.
pub fn sparkline(values: &[Option<u64>], columns: usize) -> String {
    let most = values.iter().flatten().max().copied().unwrap_or(0);
    let bar = |value: Option<u64>| match value {
        None => MISSING,
        Some(0) => LEVELS[0],
        Some(value) => {
            let steps = LEVELS.len() as u64 - 1;
            LEVELS[(u128::from(value) * u128::from(steps)).div_ceil(u128::from(most)) as usize]
        }
    };
    let columns = columns.min(values.len());
    let largest = |column| values[part(column, columns, values.len())].iter().flatten().max();
    (0..columns).map(|column| bar(largest(column).copied())).collect()
}

/// Returns the values that one of so many columns stands for.
fn part(column: usize, columns: usize, count: usize) -> Range<usize> {
    column * count / columns..(column + 1) * count / columns
}

/// Renders the series of a run: a chart for each of [`GRAPHS`], and one for the other columns. Columns that
/// are 0 all the time are left out.
pub fn series(run: &Run) -> String {
    let Series { interval_ns, columns } = &run.series;
    let times = columns.get("time_ns").map_or(&[][..], Vec::as_slice);
    let moves = |values: &[Option<u64>]| values.iter().flatten().any(|value| *value > 0);
    let mut rest: Vec<(&String, &Vec<Option<u64>>)> =
        columns.iter().filter(|(id, values)| *id != "time_ns" && moves(values)).collect();
    if rest.is_empty() {
        return String::new();
    }
    let mut out = String::new();
    for (title, members) in GRAPHS {
        let belongs = |id: &str| members.iter().any(|member| id == *member || id.contains(member));
        let (own, others) = rest.into_iter().partition(|(id, _)| belongs(id));
        rest = others;
        out += &graph(
            &format!("{title}, a point each {}", Nanos(*interval_ns)),
            &run.phases,
            times,
            own,
        );
    }
    out + &graph(
        &format!("Other series, a point each {}", Nanos(*interval_ns)),
        &run.phases,
        times,
        rest,
    )
}

/// Renders columns of a series below each other, with their own scales, and the phases above them.
fn graph(
    title: &str,
    phases: &[ReportPhase],
    times: &[Option<u64>],
    columns: Vec<(&String, &Vec<Option<u64>>)>,
) -> String {
    if columns.is_empty() {
        return String::new();
    }
    let row = |(id, values): (&String, &Vec<Option<u64>>)| {
        let unit = match counter(id) {
            Some(counter) => counter.unit,
            None if id.contains("_ns") => Unit::Ns,
            None if id.contains("_bytes") => Unit::Bytes,
            None => Unit::Count,
        };
        let most = values.iter().flatten().max().copied().unwrap_or(0);
        let least = values.iter().flatten().min().copied().unwrap_or(0);
        let scale = format!("0 to {}, least {}", text::value(unit, most), text::value(unit, least));
        vec![id.clone(), sparkline(values, COLUMNS), scale]
    };
    let ruler = vec![vec![String::new(), ruler(phases, times), String::new()]];
    let rows = ruler.into_iter().chain(columns.into_iter().map(row)).collect();
    text::heading(title) + &text::table(&["", "", ""], &[], rows)
}

/// Returns the names of phases where they begin, as far as there is room.
fn ruler(phases: &[ReportPhase], times: &[Option<u64>]) -> String {
    let width = COLUMNS.min(times.len());
    let column_of = |ns: u64| {
        let before = times.iter().flatten().filter(|time| **time <= ns).count();
        before * width / times.len().max(1)
    };
    let mut line = vec![' '; width];
    for phase in phases {
        let name = ['|'].into_iter().chain(phase.name.chars());
        let place = line.iter_mut().skip(column_of(phase.start_ns));
        place.zip(name).for_each(|(cell, letter)| *cell = letter);
    }
    line.into_iter().collect::<String>().trim_end().into()
}

/// The columns of a power of ten in a histogram, and the most columns.
const DECADE: usize = 8;
const HISTOGRAM: usize = 6 * DECADE;

/// Renders histograms of latencies below each other, over the same powers of ten.
pub fn histograms(latencies: &BTreeMap<String, Latency>) -> String {
    let ends =
        latencies.values().flat_map(|latency| &latency.buckets).map(|bucket| bucket.up_to_ns);
    let (Some(least), Some(most)) = (ends.clone().min(), ends.max()) else {
        return String::new();
    };
    let first = least.max(1).ilog10();
    let decades = most.max(1).ilog10() - first + 1;
    let width = (decades as usize * DECADE).min(HISTOGRAM);
    let column_of = |ns: u64| {
        let place = ((ns.max(1) as f64).log10() - f64::from(first)) * DECADE as f64;
        (place as usize).min(width - 1)
    };
    let row = |(kind, latency): (&String, &Latency)| {
        let mut counts = vec![Some(0); width];
        for bucket in &latency.buckets {
            *counts[column_of(bucket.up_to_ns)].get_or_insert(0) += bucket.count;
        }
        let most = counts.iter().flatten().max().copied().unwrap_or(0);
        vec![kind.clone(), sparkline(&counts, width), format!("0 to {}", text::count(most))]
    };
    let label = |decade: u32| {
        let time = Nanos(10u64.pow(decade)).to_string().replace(".00", "").replace(".0", "");
        format!("{:<DECADE$}", format!("|{time}"))
    };
    let ruler: String = (first..first + decades).take(width / DECADE).map(label).collect();
    let ruler = vec![vec![String::new(), ruler.trim_end().into(), String::new()]];
    let shown = latencies.iter().filter(|(_, latency)| !latency.buckets.is_empty()).map(row);
    text::table(&["", "", ""], &[], ruler.into_iter().chain(shown).collect())
}

/// From nothing to the most.
const SHADES: [char; 5] = [' ', '░', '▒', '▓', '█'];
/// The most rows of a heatmap.
const HEATMAP_ROWS: usize = 16;

/// Renders counts by row and column as shades, on a scale of powers of ten, with the label of each row. The
/// first row is at the bottom. Rows and columns that share a place show the largest of them.
pub fn heatmap(rows: &[(String, &[u64])]) -> String {
    let most = rows.iter().flat_map(|(_, counts)| *counts).max().copied().unwrap_or(0);
    let shade = |count: u64| match count {
        0 => SHADES[0],
        count => {
            let part = (count as f64).ln_1p() / (most as f64).ln_1p();
            SHADES[((part * 4.0).ceil() as usize).clamp(1, 4)]
        }
    };
    let columns = rows.first().map_or(0, |(_, counts)| counts.len());
    let width = columns.min(COLUMNS);
    let mut lines = Vec::new();
    for group in rows.chunks(rows.len().div_ceil(HEATMAP_ROWS).max(1)) {
        let cell = |place: usize| {
            let counts = group.iter().flat_map(|(_, counts)| &counts[part(place, width, columns)]);
            shade(counts.max().copied().unwrap_or(0))
        };
        let cells: String = (0..width).map(cell).collect();
        lines.push(format!("  {} |{cells}|\n", group[0].0));
    }
    lines.reverse();
    lines.concat()
        + &format!("  each place has its largest count: ░ few, █ up to {}\n", text::count(most))
}

/// A curve: the letter of its points, its name and its values.
pub struct Curve {
    pub letter: char,
    pub name: String,
    pub values: Vec<f64>,
}

/// Renders curves over the same places, with a scale of powers of ten. Where points meet, the first curve's
/// is seen. Values that are 0 have no place on such a scale, and are drawn below it.
pub fn curves(unit: &str, places: &[String], curves: &[Curve]) -> String {
    let all =
        || curves.iter().flat_map(|curve| &curve.values).copied().filter(|value| *value > 0.0);
    let (low, high) = (all().fold(f64::INFINITY, f64::min), all().fold(0.0, f64::max));
    if high == 0.0 {
        return String::new();
    }
    let (low, high) = (low.log10().floor(), high.log10().ceil().max(low.log10().floor() + 1.0));
    let step = (72 / places.len().max(1)).clamp(1, 8);
    let row_of = |value: f64| match value > 0.0 {
        true => (((high - value.log10()) / (high - low)) * ROWS as f64).round() as usize,
        false => ROWS + 1,
    };
    let mut grid = vec![vec![' '; places.len() * step]; ROWS + 2];
    for curve in curves.iter().rev() {
        for (nth, value) in curve.values.iter().enumerate() {
            grid[row_of(*value)][nth * step + step / 2] = curve.letter;
        }
    }
    let mut out = String::new();
    for (row, cells) in grid.iter().enumerate() {
        let power = high - (high - low) * row as f64 / ROWS as f64;
        let label = match row {
            _ if row == ROWS + 1 => format!("0 {unit}"),
            _ if (power - power.round()).abs() < 0.5 * (high - low) / ROWS as f64 => {
                format!("{} {unit}", power_of_ten(power.round()))
            }
            _ => String::new(),
        };
        let cells = cells.iter().collect::<String>();
        out += &format!("{label:>11} |{}\n", cells.trim_end());
    }
    let labels: String = places.iter().map(|place| format!("{place:^step$}")).collect();
    out += &format!("{:>11} |{}\n", "", labels.trim_end());
    let legend: Vec<String> =
        curves.iter().map(|curve| format!("{} {}", curve.letter, curve.name)).collect();
    out + &format!("{:>11}  {}\n", "", legend.join(", "))
}

fn power_of_ten(power: f64) -> String {
    match power >= 0.0 {
        true => format!("{}", 10f64.powf(power)),
        false => format!("{:.*}", -power as usize, 10f64.powf(power)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagetax_core::counter::Provenance;

    #[test]
    fn bars_begin_at_zero_and_what_is_missing_is_no_zero() {
        let values = [Some(0), Some(1), Some(50), Some(100), None];
        assert_eq!(sparkline(&values, 10), "▁▂▅█·");
        assert_eq!(sparkline(&[Some(0), Some(0)], 10), "▁▁");
        assert_eq!(sparkline(&[], 10), "");
    }

    #[test]
    fn a_narrow_chart_keeps_each_maximum() {
        let mut values = vec![Some(1); 1000];
        values[777] = Some(1_000_000);
        let line = sparkline(&values, 20);
        assert_eq!((line.chars().count(), line.matches('█').count()), (20, 1));
    }

    #[test]
    fn a_histogram_has_powers_of_ten_and_all_its_faults() {
        let mut times = hdrhistogram::Histogram::new(3).unwrap();
        [800, 1_200, 1_210, 90_000].iter().for_each(|ns| times.record(*ns).unwrap());
        let latency = Latency::of(&times, None, Provenance::Measured);
        let text = histograms(&BTreeMap::from([("minor_fault".to_string(), latency)]));
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[0].trim(), "|100 ns |1 µs   |10 µs", "{text}");
        assert!(lines[1].trim_end().ends_with("0 to 2"), "{text}");
        assert_eq!(lines[1].matches(['█', '▅']).count(), 3, "{text}");
        assert!(lines.iter().all(|line| line.chars().count() <= 80), "{text}");
        assert_eq!(histograms(&BTreeMap::new()), "");
    }

    #[test]
    fn a_heatmap_has_its_lowest_address_at_the_bottom() {
        let (low, high) = ([1, 0, 0], [0, 0, 1000]);
        let text = heatmap(&[("low".into(), &low), ("high".into(), &high)]);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[..2], ["  high |  █|", "  low |░  |"]);
        assert!(lines[2].ends_with("up to 1 000"), "{text}");
    }

    #[test]
    fn a_curve_has_its_scale_and_a_place_for_zero() {
        let places = ["1", "64", "4 096"].map(String::from);
        let curve = Curve { letter: 'a', name: "4K".into(), values: vec![10.0, 0.1, 0.0] };
        let text = curves("%", &places, &[curve]);
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines[0].contains("10 % |    a"), "{text}");
        assert!(lines[12].trim_start().starts_with("0.1 % |") && lines[12].contains('a'), "{text}");
        assert!(lines[13].trim_start().starts_with("0 % |") && lines[13].contains('a'), "{text}");
        assert!(lines[15].contains("a 4K"), "{text}");
        assert!(lines.iter().all(|line| line.chars().count() <= 80), "{text}");
    }
}
