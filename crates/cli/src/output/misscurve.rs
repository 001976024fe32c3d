//! Miss curves as tables and as CSV.

use super::{chart, text};
use anyhow::Result;
use pagetax_core::units::Bytes;
use pagetax_recorder::counters::Side;
use pagetax_recorder::documents::{MissCurve, MissCurves, MissPoint};
use pagetax_recorder::heatmap::HeatmapCounts;
use pagetax_recorder::known_tlbs::KnownTlb;

/// Renders misses by entries, the reach of TLBs and the working set.
pub fn render(document: &MissCurves) -> String {
    let MissCurves { of, side, access_count, thread_count, curves, .. } = document;
    let accesses = match side {
        Side::Code => "instruction fetches",
        Side::Data => "loads and stores",
    };
    let mut out = format!(
        "{of}: {} {accesses}, {thread_count} threads; TLBs that are fully associative, LRU: modelled\n",
        text::count(*access_count)
    );
    let name = |curve: &MissCurve| {
        format!("{}{}", if curve.is_exact { "" } else { "≈" }, Bytes(curve.page_bytes))
    };
    let names: Vec<String> = curves.iter().map(name).collect();
    let headings: Vec<&str> =
        ["entries"].into_iter().chain(names.iter().map(String::as_str)).collect();
    let numeric: Vec<usize> = (0..headings.len()).collect();
    out += &text::heading("misses, % of accesses");
    let points = curves.first().map_or(&[][..], |curve| &curve.misses);
    let row = |(nth, point): (usize, &MissPoint)| {
        let of_size = |curve: &MissCurve| share(curve.misses[nth].tlb_miss_count, *access_count);
        [text::count(point.entries)].into_iter().chain(curves.iter().map(of_size)).collect()
    };
    out += &text::table(&headings, &numeric, points.iter().enumerate().map(row).collect());
    out += &drawn(document);
    if let Some(first) = curves.first() {
        out += &text::heading(&format!("TLB reach for {} % of accesses", first.reach.percent));
    }
    let rows = curves.iter().map(reach_row).collect();
    out += &text::table(&["pages", "entries", "reach", "pages touched"], &[0, 1, 2, 3], rows);
    out += &known(document);
    out += &text::heading(&format!(
        "working set, in intervals of {} accesses",
        text::count(document.interval_access_count)
    ));
    let rows = curves.iter().map(working_set_row).collect();
    out += &text::table(&["pages", "least", "median", "most"], &[0, 1, 2, 3], rows);
    out + &document.heatmap.as_ref().map_or(String::new(), heatmap)
}

/// Renders the misses of TLBs as large as the second levels of known CPUs.
fn known(document: &MissCurves) -> String {
    if document.known_tlbs.is_empty() {
        return String::new();
    }
    let row = |tlb: &KnownTlb| {
        vec![
            tlb.cpu.clone(),
            Bytes(tlb.page_bytes).to_string(),
            text::count(tlb.entries),
            Bytes(tlb.entries * tlb.page_bytes).to_string(),
            share(tlb.tlb_miss_count, document.access_count),
        ]
    };
    text::heading("second-level TLBs of known CPUs, as if fully associative: misses, % of accesses")
        + &text::table(
            &["CPU", "pages", "entries", "reach", "misses"],
            &[1, 2, 3, 4],
            document.known_tlbs.iter().map(row).collect(),
        )
}

/// Draws page changes by time and address.
fn heatmap(map: &HeatmapCounts) -> String {
    let rows = map.row_starts.iter().zip(&map.page_change_counts);
    let rows: Vec<(String, &[u64])> =
        rows.map(|(start, counts)| (format!("{start:#014x}"), &counts[..])).collect();
    let columns = map.page_change_counts.first().map_or(0, Vec::len);
    let width = text::count(map.column_access_count);
    text::heading(&format!(
        "page changes, {columns} times {width} accesses from left to right, by address"
    )) + &chart::heatmap(&rows)
}

/// Draws the curves.
fn drawn(document: &MissCurves) -> String {
    let percent = |point: &MissPoint| {
        point.tlb_miss_count as f64 * 100.0 / document.access_count.max(1) as f64
    };
    let curve = |(letter, curve): (char, &MissCurve)| chart::Curve {
        letter,
        name: Bytes(curve.page_bytes).to_string(),
        values: curve.misses.iter().map(percent).collect(),
    };
    let curves: Vec<chart::Curve> = ('a'..='z').zip(&document.curves).map(curve).collect();
    let points = document.curves.first().map_or(&[][..], |curve| &curve.misses);
    let places: Vec<String> = points.iter().map(|point| short(point.entries)).collect();
    text::heading("misses by entries") + &chart::curves("%", &places, &curves)
}

/// Returns a number of entries in few letters: `512`, `1.5k`.
fn short(entries: u64) -> String {
    match entries {
        0..1024 => entries.to_string(),
        1024..1_048_576 if entries % 1024 == 512 => format!("{}.5k", entries >> 10),
        1024..1_048_576 => format!("{}k", entries >> 10),
        _ => format!("{}M", entries >> 20),
    }
}

/// Returns the share of misses in percent, to three digits: `12.3`, `0.0004`.
fn share(misses: u64, accesses: u64) -> String {
    if accesses == 0 {
        return text::MISSING.into();
    }
    let percent = misses as f64 * 100.0 / accesses as f64;
    match percent {
        0.0 => "0".into(),
        percent if percent >= 10.0 => format!("{percent:.1}"),
        percent => {
            format!("{percent:.*}", (2 - percent.log10().floor() as i32).clamp(2, 7) as usize)
        }
    }
}

fn bytes(pages: u64, curve: &MissCurve) -> String {
    Bytes(pages.saturating_mul(curve.page_bytes)).to_string()
}

fn reach_row(curve: &MissCurve) -> Vec<String> {
    let entries = curve.reach.entries;
    vec![
        Bytes(curve.page_bytes).to_string(),
        entries.map_or("none: first touches miss more".into(), text::count),
        entries.map_or(text::MISSING.into(), |entries| bytes(entries, curve)),
        text::count(curve.page_count),
    ]
}

fn working_set_row(curve: &MissCurve) -> Vec<String> {
    let mut pages = curve.working_set_page_counts.clone();
    pages.sort_unstable();
    let at = |place: Option<&u64>| place.map_or(text::MISSING.into(), |pages| bytes(*pages, curve));
    let median = pages.get(pages.len() / 2);
    vec![Bytes(curve.page_bytes).to_string(), at(pages.first()), at(median), at(pages.last())]
}

/// Renders a line for each point of each curve.
pub fn csv(document: &MissCurves) -> Result<String> {
    let mut out = String::from("page_bytes,entries,tlb_miss_count,access_count,is_exact\n");
    for curve in &document.curves {
        for point in &curve.misses {
            out += &format!(
                "{},{},{},{},{}\n",
                curve.page_bytes,
                point.entries,
                point.tlb_miss_count,
                document.access_count,
                curve.is_exact
            );
        }
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_keep_three_digits() {
        let shares =
            [(1, 3), (1, 1000), (3, 100_000_000), (0, 5), (1, 0)].map(|(m, a)| share(m, a));
        assert_eq!(shares, ["33.3", "0.100", "0.0000030", "0", "–"]);
    }
}
