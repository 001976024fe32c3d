//! The parts of docs/ that commands write: a block between `<!-- begin: COMMAND -->` and `<!-- end -->`.

use crate::shell;
use anyhow::{Context, Result, bail};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

const PAGES: &str = "docs";
const END: &str = "<!-- end -->\n";

/// Replaces the block of a command, on the one page of docs/ that has it.
///
/// # Errors
/// Fails if no page has the block, or a file cannot be read or written.
pub fn write(command: &str, content: &str) -> Result<()> {
    let begin = format!("<!-- begin: {command} -->\n");
    for page in all_pages()? {
        let text = fs::read_to_string(&page)?;
        if let Some(text) = replaced(&text, &begin, content) {
            fs::write(&page, text)?;
            println!("wrote {}", page.display());
            return Ok(());
        }
    }
    bail!("no page of {PAGES}/ has the lines {} … {}", begin.trim(), END.trim())
}

/// Returns the block of a command; none if no page has it.
///
/// # Errors
/// Fails if a page cannot be read.
pub fn read(command: &str) -> Result<Option<String>> {
    let begin = format!("<!-- begin: {command} -->\n");
    let in_page = |text: String| {
        let (_, rest) = text.split_once(&begin)?;
        Some(rest.split_once(END)?.0.to_string())
    };
    let texts: Vec<String> =
        all_pages()?.iter().map(fs::read_to_string).collect::<Result<_, _>>()?;
    Ok(texts.into_iter().find_map(in_page))
}

/// Returns true if some page has a block of the command.
pub fn has(command: &str) -> Result<bool> {
    Ok(read(command)?.is_some())
}

/// Returns the pages of docs/ and of its folders.
fn all_pages() -> Result<Vec<PathBuf>> {
    let folders = ["", "cases", "internals"].map(|folder| pages(&Path::new(PAGES).join(folder)));
    Ok(folders.into_iter().collect::<Result<Vec<_>>>()?.concat())
}

fn pages(directory: &Path) -> Result<Vec<PathBuf>> {
    let mut pages: Vec<PathBuf> =
        fs::read_dir(directory)?.map(|entry| Ok(entry?.path())).collect::<Result<_>>()?;
    pages.retain(|path| path.extension().is_some_and(|extension| extension == "md"));
    pages.sort();
    Ok(pages)
}

fn replaced(text: &str, begin: &str, content: &str) -> Option<String> {
    let (head, rest) = text.split_once(begin)?;
    let (_, tail) = rest.split_once(END)?;
    Some(format!("{head}{begin}\n{}\n\n{END}{tail}", content.trim()))
}

/// Returns a Markdown table. Short rows are filled with empty cells.
pub fn table(headings: &[&str], rows: &[Vec<String>]) -> String {
    let line = |cells: Vec<&str>| format!("| {} |\n", cells.join(" | "));
    let mut table = line(headings.to_vec()) + &format!("|{}\n", "---|".repeat(headings.len()));
    for row in rows {
        let cell = |column| row.get(column).map_or("", String::as_str);
        table += &line((0..headings.len()).map(cell).collect());
    }
    table
}

/// Returns this machine in a few words: CPU, number of CPUs, kernel.
pub fn machine() -> Result<String> {
    let cpu = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let cpu = cpu.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'));
    let cpu = cpu.map_or("an unknown CPU", |(_, name)| name.trim());
    let count = std::thread::available_parallelism()?;
    let kernel = shell::output(Command::new("uname").arg("-r")).context("no kernel version")?;
    Ok(format!("{cpu}, {count} CPUs, Linux {}", kernel.trim()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_is_replaced_and_all_else_stays() {
        let page = "a\n<!-- begin: x -->\nold\n<!-- end -->\nb\n<!-- end -->\n";
        let begin = "<!-- begin: x -->\n";
        let new = "a\n<!-- begin: x -->\n\nnew\n\n<!-- end -->\nb\n<!-- end -->\n";
        assert_eq!(replaced(page, begin, "new\n").as_deref(), Some(new));
        assert_eq!(replaced(new, begin, "new").as_deref(), Some(new));
        assert_eq!(replaced(page, "<!-- begin: y -->\n", "new"), None);
    }

    #[test]
    fn short_rows_are_filled() {
        let rows = [vec!["1".into(), "2".into()], vec!["3".into()]];
        assert_eq!(table(&["a", "b"], &rows), "| a | b |\n|---|---|\n| 1 | 2 |\n| 3 |  |\n");
    }
}
