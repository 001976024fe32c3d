//! A forecast as a table and as JSON.

use super::{Bounded, Forecast, Prediction};
use crate::output::text;
use pagetax_core::units::Nanos;
use pagetax_recorder::predict::{Faults, Walks};
use serde_json::{Value, json};

fn ns(ns: f64) -> String {
    Nanos(ns.max(0.0) as u64).to_string()
}

fn bounded(value: Option<Bounded>, show: impl Fn(f64) -> String) -> [String; 2] {
    value.map_or([text::MISSING.into(), String::new()], |bounded| {
        [show(bounded.value), format!("{} – {}", show(bounded.low), show(bounded.high))]
    })
}

fn ratio(ratio: f64) -> String {
    format!("{ratio:.3}")
}

/// What is predicted, and why.
pub fn table(forecast: &Forecast) -> String {
    let mut out = format!(
        "{}: {} loads and stores; predicted from its pages and this machine's calibration\n",
        forecast.of,
        text::count(forecast.access_count)
    );
    out += &text::heading("time by page size (derived, but for the time on base pages)");
    let base = forecast.base_ns.map_or(text::MISSING.into(), |ns| Nanos(ns).to_string());
    let mut rows = vec![vec!["4K".into(), base, "measured".into(), "1".into()]];
    rows.extend(forecast.predictions.iter().map(time_row));
    let headings =
        ["pages", "time", "low – high", "speed-up", "low – high", "measured", "error", "saves"];
    out += &text::table(&headings, &[1, 3, 5, 6, 7], rows);
    out += &text::heading("why");
    let mut rows = vec![why_row("4K", &forecast.walks, forecast.faults, forecast.overlap)];
    for prediction in &forecast.predictions {
        let name = prediction.size.to_string();
        rows.push(why_row(&name, &prediction.walks, prediction.faults, forecast.overlap));
    }
    let headings =
        ["pages", "chased walks", "other walks", "translation", "low – high", "faults", "large"];
    out + &text::table(&headings, &[1, 2, 3, 5, 6], rows)
}

fn time_row(prediction: &Prediction) -> Vec<String> {
    let saved = prediction.saved_ns.value;
    let sign = if saved < 0.0 { "-" } else { "" };
    let [time, time_range] = bounded(prediction.time_ns, ns);
    let [speedup, speedup_range] = bounded(prediction.speedup, ratio);
    vec![
        prediction.size.to_string(),
        time,
        time_range,
        speedup,
        speedup_range,
        prediction.measured.map_or(text::MISSING.into(), |measured| ratio(measured.value)),
        prediction.error_percent().map_or(text::MISSING.into(), |error| format!("{error:+.1} %")),
        format!("{sign}{}", ns(saved.abs())),
    ]
}

fn why_row(size: &str, walks: &Walks, faults: Faults, overlap: f64) -> Vec<String> {
    let (value, low, high) = walks.ns(overlap);
    vec![
        size.into(),
        text::count(walks.chased_count),
        text::count(walks.other_count),
        ns(value),
        format!("{} – {}", ns(low), ns(high)),
        text::count(faults.base_count),
        text::count(faults.large_count),
    ]
}

fn json_of(value: Bounded) -> Value {
    let Bounded { value, low, high } = value;
    json!({"provenance": "derived", "value": value, "low": low, "high": high})
}

fn json_of_walks(walks: &Walks, faults: Faults, overlap: f64) -> Value {
    let (value, low, high) = walks.ns(overlap);
    json!({
        "chased_walk_count": walks.chased_count, "other_walk_count": walks.other_count,
        "translation_ns": json_of(Bounded { value, low, high }),
        "base_fault_count": faults.base_count, "large_fault_count": faults.large_count,
    })
}

/// As JSON, schema 1.
pub fn document(forecast: &Forecast, code: Option<u8>) -> Value {
    let size = |prediction: &Prediction| {
        let walks = json_of_walks(&prediction.walks, prediction.faults, forecast.overlap);
        json!({
            "page_bytes": prediction.size.bytes(), "why": walks,
            "saved_ns": json_of(prediction.saved_ns),
            "time_ns": prediction.time_ns.map(json_of), "speedup": prediction.speedup.map(json_of),
            "measured_speedup": prediction.measured.map(|ratio| json!({
                "provenance": "measured", "value": ratio.value, "low": ratio.low, "high": ratio.high,
            })),
            "error_percent": prediction.error_percent(),
        })
    };
    json!({
        "schema": 1, "kind": "whatif", "of": forecast.of, "exit": code,
        "access_count": forecast.access_count, "walk_overlap": forecast.overlap,
        "base": {
            "time_ns": forecast.base_ns,
            "why": json_of_walks(&forecast.walks, forecast.faults, forecast.overlap),
        },
        "sizes": forecast.predictions.iter().map(size).collect::<Vec<_>>(),
        "notes": forecast.notes,
    })
}
