//! The page-ins of replacement policies as text.

use super::text;
use pagetax_core::units::{Bytes, Nanos};
use pagetax_remote::documents::{Replacement, ReplacementAtLimit};
use pagetax_remote::pager::replacement::PolicyName;

/// Renders the table of policies, and the time that page-ins would take.
pub fn render(document: &Replacement) -> String {
    let title = format!(
        "{}: {} of heap and anonymous mappings, {} changes of page\n\n",
        document.title,
        Bytes(document.page_count * 4096),
        text::count(document.access_count)
    );
    let headings = ["resident", "pager", "LRU", "ARC", "optimum", "pager ÷ best", "fetched", "put"];
    let rows = document.limits.iter().map(|at| row(document, at)).collect();
    title + &text::table(&headings, &[0, 1, 2, 3, 4, 5, 6, 7], rows) + &time(document)
}

fn row(document: &Replacement, at: &ReplacementAtLimit) -> Vec<String> {
    let asked = if at.resident_bytes == document.resident_bytes { " ◀" } else { "" };
    let page_ins = |policy| at.of(policy).map(|counts| counts.page_in_count);
    let cell = |count: Option<u64>| count.map_or(text::MISSING.into(), text::count);
    let best = page_ins(PolicyName::Lru).min(page_ins(PolicyName::Arc));
    let ratio = page_ins(PolicyName::Pager).zip(best.filter(|best| *best > 0));
    let pager = at.of(PolicyName::Pager);
    let mut cells = vec![Bytes(at.resident_bytes).to_string()];
    cells.extend(PolicyName::ALL.map(|policy| cell(page_ins(policy))));
    cells
        .push(ratio.map_or(text::MISSING.into(), |(own, best)| {
            format!("{:.2}", own as f64 / best as f64)
        }));
    cells.push(cell(pager.map(|counts| counts.fetched_count)));
    cells.push(cell(pager.map(|counts| counts.put_count)) + asked);
    cells
}

fn time(document: &Replacement) -> String {
    let asked = document.limits.iter().find(|at| at.resident_bytes == document.resident_bytes);
    let page_ins = asked.and_then(|at| at.of(PolicyName::Pager)).map(|counts| counts.page_in_count);
    let Some((count, each)) = page_ins.zip(document.page_in) else { return String::new() };
    let all = |ns: u64| Nanos(ns.saturating_mul(count));
    format!(
        "\nWith {} resident, page-ins make it {} slower ({}–{}): {} of {} each, as measured on this store\n",
        Bytes(document.resident_bytes),
        all(each.median_ns),
        all(each.low_ns),
        all(each.high_ns),
        text::count(count),
        Nanos(each.median_ns)
    )
}
