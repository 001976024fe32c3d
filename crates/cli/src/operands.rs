//! The words of commands that print a listing in each interval: `[FILE] [INTERVAL [COUNT]]`.

use anyhow::{Result, anyhow};
use pagetax_core::units::Nanos;
use std::path::PathBuf;

/// The words, each of which may be absent.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Operands {
    pub file: Option<PathBuf>,
    pub interval: Option<f64>,
    pub count: Option<u64>,
}

/// Parses an interval: seconds, or a time with its unit.
fn seconds(word: &str) -> Option<f64> {
    word.parse().ok().or_else(|| Some(word.parse::<Nanos>().ok()?.0 as f64 / 1e9))
}

impl Operands {
    /// Parses the words. What is no number is a file.
    pub fn parse(words: &[String]) -> Result<Operands> {
        let file = words.first().filter(|word| seconds(word).is_none()).map(PathBuf::from);
        let numbers = &words[usize::from(file.is_some())..];
        let hint = "hint: [FILE] [INTERVAL [COUNT]], as in app.ptt 0.5 10";
        let wrong = |word: &String, what| anyhow!("`{word}` is no {what}\n  {hint}");
        let interval = numbers.first().map(|word| seconds(word).ok_or(wrong(word, "interval")));
        let count = numbers.get(1).map(|word| word.parse().map_err(|_| wrong(word, "count")));
        match numbers.get(2) {
            Some(word) => Err(anyhow!("`{word}` is one word too many\n  {hint}")),
            None => {
                Ok(Operands { file, interval: interval.transpose()?, count: count.transpose()? })
            }
        }
    }

    /// Returns the interval in nanoseconds, if there is one.
    pub fn interval_ns(&self) -> Result<Option<u64>> {
        let Some(seconds) = self.interval else { return Ok(None) };
        if !(seconds.is_finite() && seconds >= 0.001) {
            return Err(anyhow!(
                "an interval of {seconds} s\n  hint: name a millisecond or more, in seconds: 0.001"
            ));
        }
        Ok(Some((seconds * 1e9) as u64))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_stands_before_the_numbers() {
        let parse = |words: &[&str]| {
            Operands::parse(&words.iter().map(ToString::to_string).collect::<Vec<_>>())
        };
        let file = Some(PathBuf::from("a.ptt"));
        assert_eq!(parse(&[]).unwrap(), Operands::default());
        let all = parse(&["a.ptt", "0.5", "3"]).unwrap();
        assert_eq!(all, Operands { file, interval: Some(0.5), count: Some(3) });
        assert_eq!(parse(&["500ms"]).unwrap().interval, Some(0.5));
        let numbers = parse(&["1", "10"]).unwrap();
        assert_eq!((numbers.file, numbers.interval, numbers.count), (None, Some(1.0), Some(10)));
        for wrong in [&["a.ptt", "b"][..], &["1", "x"], &["1", "2", "3"], &["a", "1", "1.5"]] {
            assert!(parse(wrong).unwrap_err().to_string().contains("INTERVAL"), "{wrong:?}");
        }
    }
}
