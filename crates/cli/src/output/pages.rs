//! Verdicts on page sizes as text.

use super::text;
use pagetax_core::units::Bytes;
use pagetax_host::pages::Verdict;
use pagetax_host::pages::text::FileText;

/// Renders verdicts of several processes: a row for each part, then reasons for bytes on other pages.
pub fn verdicts(verdicts: &[&Verdict]) -> String {
    let rows = verdicts.iter().flat_map(|verdict| {
        verdict.parts.iter().map(|part| {
            let share = match part.resident_bytes {
                0 => text::MISSING.into(),
                all => format!("{:.0} %", part.as_asked_bytes as f64 / all as f64 * 100.0),
            };
            let pages = part.resident_bytes_by_page.iter();
            let pages = pages.map(|(size, bytes)| format!("{} on {}", Bytes(*bytes), Bytes(*size)));
            vec![
                verdict.pid.to_string(),
                part.part.to_string(),
                part.asked.to_string(),
                Bytes(part.resident_bytes).to_string(),
                Bytes(part.as_asked_bytes).to_string(),
                share,
                pages.collect::<Vec<_>>().join(", "),
            ]
        })
    });
    let headings = ["pid", "part", "asked", "resident", "as asked", "share", "pages"];
    let mut out = text::table(&headings, &[0, 3, 4, 5], rows.collect());
    for verdict in verdicts {
        for part in &verdict.parts {
            for why in &part.why {
                let (pid, part, bytes) = (verdict.pid, part.part, Bytes(why.bytes));
                out += &format!("  {pid} {part}: {bytes} not: {}\n", why.reason);
            }
        }
    }
    out
}

/// Renders the code files, with the bytes that huge pages can map.
pub fn files(files: &[FileText]) -> String {
    let row = |file: &FileText| {
        vec![
            file.path.display().to_string(),
            Bytes(file.aligned_bytes).to_string(),
            Bytes(file.large_bytes).to_string(),
            file.why.clone().unwrap_or_default(),
        ]
    };
    let headings = ["code of", "aligned", "by huge pages", "why not all"];
    text::table(&headings, &[1, 2], files.iter().map(row).collect())
}
