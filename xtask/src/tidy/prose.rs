//! Rules of sentences, and the prose of Markdown and C.

/// The longest sentence; docs/internals/style.md asks for 25 words.
const WORDS_MAX: usize = 30;
/// Words that the field does not use, from docs/internals/style.md.
const ODD: &[&str] = &[
    "ailing",
    "are told",
    "be told",
    "be had",
    "been told",
    "beyond doubt",
    "buried",
    "bury",
    "dear",
    "dearer",
    "dearest",
    "hitherto",
    "in so many words",
    "is told",
    "lest",
    "mend",
    "mended",
    "mends",
    "nought",
    "of before",
    "of late",
    "reckon",
    "reckoned",
    "reckons",
    "stranger",
    "strangers",
    "the one before",
    "thereof",
    "thousand million",
    "was told",
    "were told",
    "whence",
    "wherein",
    "whereof",
    "whoever",
];

/// Reports sentences that are too long, and odd words.
pub fn check(text: &str, mut found: impl FnMut(String)) {
    let text = without_code(text);
    for sentence in sentences(&text) {
        let words = sentence.split([' ', '/']).filter(|word| has_letter(word)).count();
        if words > WORDS_MAX {
            let begin: String = sentence.chars().take(60).collect();
            found(format!("{words} words in a sentence (at most {WORDS_MAX}): {begin}…"));
        }
    }
    let plain: String =
        text.to_lowercase().chars().map(|c| if c.is_alphanumeric() { c } else { ' ' }).collect();
    let plain = format!(" {} ", plain.split_whitespace().collect::<Vec<_>>().join(" "));
    let odd = ODD.iter().filter(|word| plain.contains(&format!(" {word} ")));
    odd.for_each(|word| found(format!("odd word: {word}")));
}

fn has_letter(word: &str) -> bool {
    word.contains(char::is_alphanumeric)
}

/// Replaces code in backquotes by one word, and removes the targets of links.
fn without_code(text: &str) -> String {
    let mut parts = text.split('`').enumerate();
    let prose = parts.by_ref().map(|(number, part)| if number % 2 == 1 { "code" } else { part });
    let mut text: String = prose.collect();
    while let Some(begin) = text.find("](") {
        let end = text[begin..].find(')').map_or(text.len(), |end| begin + end + 1);
        text.replace_range(begin..end, "]");
    }
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Splits at full stops, colons and semicolons before a space.
fn sentences(text: &str) -> Vec<&str> {
    const ABBREVIATIONS: [&str; 5] = ["e.g", "i.e", "cf", "vs", "No"];
    let mut sentences = Vec::new();
    let mut begin = 0;
    for (at, _) in text.match_indices(['.', '!', '?', ':', ';']) {
        let before = &text[begin..at];
        let ends = text[at + 1..].starts_with(' ')
            && !ABBREVIATIONS.iter().any(|short| before.ends_with(short));
        if ends {
            sentences.push(before);
            begin = at + 1;
        }
    }
    sentences.push(&text[begin..]);
    sentences
}

/// Returns the paragraphs, list items and table cells of Markdown with their first lines, without code
/// blocks.
pub fn paragraphs(text: &str) -> impl Iterator<Item = (usize, String)> + use<> {
    let mut found: Vec<(usize, String)> = Vec::new();
    let (mut is_code, mut is_open) = (false, false);
    for (number, line) in text.lines().enumerate() {
        let line = line.trim();
        let is_fence = line.starts_with("```");
        is_code ^= is_fence;
        if is_code || is_fence || line.is_empty() || line.starts_with('#') {
            is_open = false;
        } else if line.starts_with('|') {
            found.extend(line.split('|').map(|cell| (number + 1, cell.to_string())));
            is_open = false;
        } else if is_open && !is_item(line) {
            let (_, paragraph) = found.last_mut().expect("an open paragraph");
            *paragraph += " ";
            *paragraph += line;
        } else {
            found.push((number + 1, line.to_string()));
            is_open = true;
        }
    }
    found.into_iter()
}

/// Tells a list item from the continuation of a paragraph.
fn is_item(line: &str) -> bool {
    let number = line.trim_start_matches(|c: char| c.is_ascii_digit());
    line.starts_with("- ")
        || line.starts_with("* ")
        || number.len() < line.len() && number.starts_with(". ")
}

/// Returns the comments of C with their lines.
pub fn c_comments(text: &str) -> impl Iterator<Item = (usize, String)> + use<> {
    let mut found: Vec<(usize, String)> = Vec::new();
    let mut rest = text;
    while let Some(begin) = rest.find("/*") {
        let line = text[..text.len() - rest.len() + begin].matches('\n').count() + 1;
        let body = &rest[begin + 2..];
        let end = body.find("*/").unwrap_or(body.len());
        let lines = body[..end].lines().map(|line| line.trim().trim_start_matches('*'));
        let comment: Vec<&str> = lines.collect();
        found.extend(paragraphs(&comment.join("\n")).map(|(at, text)| (line + at - 1, text)));
        rest = &body[end..];
    }
    found.into_iter()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn findings(text: &str) -> Vec<String> {
        let mut findings = Vec::new();
        check(text, |found| findings.push(found));
        findings
    }

    #[test]
    fn long_sentences_and_odd_words_are_found() {
        let long = vec!["word"; WORDS_MAX + 1].join(" ");
        assert_eq!(findings(&format!("{long}.")).len(), 1);
        assert_eq!(findings(&format!("Short: {}. {long}.", &long[5..])).len(), 1);
        assert_eq!(findings(&long[5..]), Vec::<String>::new());
        assert_eq!(findings("It is Dear; `of late` it is not."), ["odd word: dear"]);
        assert_eq!(findings("Amend the dearth."), Vec::<String>::new());
    }

    #[test]
    fn paragraphs_end_where_markdown_ends_them() {
        let text = "# Head\none\ntwo\n\n- three\n- four\n```\ncode\n```\n| five | six |\n";
        let texts: Vec<_> = paragraphs(text).filter(|(_, text)| !text.is_empty()).collect();
        let expected =
            [(2, "one two"), (5, "- three"), (6, "- four"), (10, " five "), (10, " six ")];
        assert_eq!(texts, expected.map(|(line, text)| (line, text.to_string())));
        let comments: Vec<_> = c_comments("int a; /* one\n * two */\n/* three */").collect();
        assert_eq!(comments, [(1, "one two".into()), (3, "three".into())]);
    }
}
