//! A forecast as tables.

use crate::output::text;
use pagetax_core::units::{Bytes, Nanos};
use pagetax_recorder::forecast::{Bounded, Forecast, Prediction};
use pagetax_recorder::predict::{Faults, Walks};

fn ns(ns: f64) -> String {
    let sign = if ns <= -1.0 { "-" } else { "" };
    format!("{sign}{}", Nanos(ns.abs() as u64))
}

fn bounded(value: Option<Bounded>, show: impl Fn(f64) -> String) -> [String; 2] {
    value.map_or([text::MISSING.into(), String::new()], |bounded| {
        [show(bounded.value), format!("{} – {}", show(bounded.low), show(bounded.high))]
    })
}

fn ratio(ratio: f64) -> String {
    if ratio.is_finite() { format!("{ratio:.3}") } else { "no bound".into() }
}

/// Renders the prediction and its reasons.
pub fn table(forecast: &Forecast) -> String {
    let mut out = format!(
        "{}: {} loads and stores; predicted from its pages and this machine's calibration\n",
        forecast.of,
        text::count(forecast.access_count)
    );
    let time = forecast.basis.heading();
    out += &text::heading(&format!("{time} by page size (derived, but for that on base pages)"));
    let base = forecast.base_ns.map_or(text::MISSING.into(), |ns| Nanos(ns).to_string());
    let mut rows = vec![vec!["4K".into(), base, "measured".into(), "1".into()]];
    rows.extend(forecast.predictions.iter().map(time_row));
    let headings =
        ["pages", time, "low – high", "speed-up", "low – high", "measured", "error", "took"];
    out += &text::table(&headings, &[1, 3, 5, 6, 7], rows);
    out += &text::heading("what is saved, of CPU time");
    let saved = forecast.predictions.iter().flat_map(saved_rows).collect();
    out += &text::table(&["pages", "of", "saved", "low – high"], &[2], saved);
    if !forecast.parts.is_empty() {
        out += &parts(forecast);
    }
    out += &text::heading("why");
    let mut rows = vec![why_row("4K", &forecast.walks, forecast.faults)];
    for prediction in &forecast.predictions {
        rows.push(why_row(&prediction.size.to_string(), &prediction.walks, prediction.faults));
    }
    let headings =
        ["pages", "chased walks", "other walks", "translation", "low – high", "faults", "large"];
    out += &text::table(&headings, &[1, 2, 3, 5, 6], rows);
    if let Some(count) = forecast.measured_fault_count {
        out += &format!("  a run on 4K pages had {} faults of all kinds\n", text::count(count));
    }
    for (pattern, pace) in &forecast.paces {
        let pattern = pattern.meaning();
        out += &format!("  walks, {pattern}, cost {pace:.2} times what they did when calibrated\n");
    }
    out
}

/// Renders what each part saves alone, and all of them at a time.
fn parts(forecast: &Forecast) -> String {
    let of_cpu = |bounded: Option<Bounded>| bounded.map(|saved| saved.value);
    let whole = forecast.predictions.first().map(|whole| whole.saved.total());
    let share = |value: Option<f64>| match (value, of_cpu(whole)) {
        (Some(value), Some(whole)) if whole > 0.0 => format!("{:.0} %", value / whole * 100.0),
        _ => text::MISSING.into(),
    };
    let row = |name: &str, bytes: Option<u64>, saved: Option<Bounded>| {
        let [value, range] = bounded(saved, ns);
        let bytes = bytes.map_or(text::MISSING.into(), |bytes| Bytes(bytes).to_string());
        vec![name.into(), bytes, value, range, share(of_cpu(saved))]
    };
    let mut rows: Vec<Vec<String>> = forecast
        .parts
        .iter()
        .map(|part| {
            row(part.part.name(), part.touched_bytes, part.saved.map(|saved| saved.total()))
        })
        .collect();
    let all_bytes: u64 = forecast.parts.iter().filter_map(|part| part.touched_bytes).sum();
    rows.push(row("sum", Some(all_bytes), forecast.saved_alone()));
    rows.push(row("all at a time", Some(all_bytes), whole));
    let mut out = text::heading("what each part saves alone on 2M pages, of CPU time");
    out += &text::table(&["part", "touched", "saved", "low – high", "share"], &[1, 2, 4], rows);
    if forecast.parts.iter().any(|part| part.saved.is_none()) {
        out += "  text: the calibration has no cost of walks for code; `diagnose --pages text=2M` measures it\n";
    }
    out
}

fn saved_rows(prediction: &Prediction) -> Vec<Vec<String>> {
    let parts = prediction.saved.parts().into_iter();
    let all = parts.chain([("all", prediction.saved.total())]);
    let row = |(name, saved): (&str, Bounded)| {
        let [value, range] = bounded(Some(saved), ns);
        vec![prediction.size.to_string(), name.into(), value, range]
    };
    all.map(row).collect()
}

fn time_row(prediction: &Prediction) -> Vec<String> {
    let took = prediction.took.as_ref().and_then(|took| took.fraction);
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
        took.map_or(text::MISSING.into(), |fraction| format!("{:.0} %", fraction * 100.0)),
    ]
}

fn why_row(size: &str, walks: &Walks, faults: Faults) -> Vec<String> {
    let (value, low, high) = walks.ns();
    vec![
        size.into(),
        text::count(walks.dependent_count),
        text::count(walks.other_count),
        ns(value),
        format!("{} – {}", ns(low), ns(high)),
        text::count(faults.base_count),
        text::count(faults.large_count),
    ]
}
