//! Links of Markdown files to other files of the tree, and to their headings.

use super::Source;
use std::collections::HashMap;
use std::fs;
use std::path::{Component, Path, PathBuf};

/// Reports links to files, and to headings of Markdown files, that do not exist.
pub fn check(tree: &Path, sources: &[Source], mut add: impl FnMut(&Path, usize, String)) {
    let markdown: Vec<&Source> = sources.iter().filter(|source| source.is("md")).collect();
    let headings: HashMap<&Path, Vec<String>> =
        markdown.iter().map(|source| (source.path.as_path(), anchors(&source.text))).collect();
    for source in &markdown {
        for (line, link) in links(&source.text) {
            let (file, anchor) = link.split_once('#').unwrap_or((link, ""));
            let target = match file {
                "" => source.path.clone(),
                _ => normal(&source.path.with_file_name("").join(file)),
            };
            match headings.get(target.as_path()) {
                Some(anchors) if !anchor.is_empty() && !anchors.iter().any(|a| a == anchor) => {
                    add(&source.path, line, format!("dead link: no heading for #{anchor}"));
                }
                None if fs::metadata(tree.join(&target)).is_err() => {
                    add(&source.path, line, format!("dead link: {link}"));
                }
                _ => {}
            }
        }
    }
}

/// Returns the targets of links and images inside the tree, with their lines.
fn links(text: &str) -> impl Iterator<Item = (usize, &str)> {
    text.lines().enumerate().flat_map(|(index, line)| {
        let targets = line.split("](").skip(1).filter_map(|rest| rest.split(')').next());
        let sources = line.split("src=\"").skip(1).chain(line.split("srcset=\"").skip(1));
        targets
            .chain(sources.filter_map(|rest| rest.split('"').next()))
            .filter(|target| !target.contains("://"))
            .map(move |target| (index + 1, target))
    })
}

/// Returns the anchors that GitHub makes of a file's headings.
fn anchors(text: &str) -> Vec<String> {
    let mut is_code = false;
    let mut anchors = Vec::new();
    for line in text.lines() {
        is_code ^= line.starts_with("```");
        if let Some(heading) = line.strip_prefix('#').filter(|_| !is_code) {
            let heading = heading.trim_start_matches('#').trim().to_lowercase();
            let kept = heading.chars().filter(|c| c.is_alphanumeric() || " -_".contains(*c));
            anchors.push(kept.map(|c| if c == ' ' { '-' } else { c }).collect());
        }
    }
    anchors
}

/// Resolves `..` by the text alone: the file need not exist.
fn normal(path: &Path) -> PathBuf {
    let mut normal = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => drop(normal.pop()),
            Component::CurDir => {}
            other => normal.push(other),
        }
    }
    normal
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dead(text: &str) -> Vec<String> {
        let tree = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let source = Source { path: "docs/page.md".into(), text: text.into() };
        let mut dead = Vec::new();
        check(&tree, &[source], |_, line, text| dead.push(format!("{line}: {text}")));
        dead
    }

    #[test]
    fn files_and_headings_must_exist() {
        let text = "# A word, `two`\n[a](#a-word-two) [b](../README.md#any) [c](https://x.y/z)\n";
        assert_eq!(dead(text), [""; 0]);
        assert_eq!(dead("\n[a](nowhere.md)"), ["2: dead link: nowhere.md"]);
        assert_eq!(dead("[a](#nothing)"), ["1: dead link: no heading for #nothing"]);
        assert_eq!(dead("<img src=\"no.svg\">"), ["1: dead link: no.svg"]);
    }
}
