//! Transcripts: what a user types and what the program answers, here and in the README.
//! `cargo xtask bless` accepts changes.

#[test]
fn transcripts() {
    let cases = trycmd::TestCases::new();
    cases.env("NO_COLOR", "1").env("COLUMNS", "100");
    cases.case("tests/transcripts/*.trycmd").case("../../README.md");
}
