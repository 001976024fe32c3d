//! Where text leaves the program. Renderers are pure and return a `String`; this prints it.
//!
//! Colour is stripped where it is not wanted (NO_COLOR, not a terminal), so renderers may style
//! freely; nothing may be said by colour alone.

use crate::exit;
use anyhow::{Context, Result};
use std::io::Write;

/// Prints a result to stdout. Fails quietly all the way up when the reader has gone (`| head`).
pub fn print(text: &str) -> Result<()> {
    let mut out = anstream::stdout().lock();
    out.write_all(text.as_bytes())
        .and_then(|()| out.flush())
        .context("cannot write to stdout; look at where it is redirected")
        .map_err(|error| exit::with(exit::UNMET, error))
}

/// Prints an error to stderr: what failed, then each cause on a line of its own.
pub fn error(error: &anyhow::Error) {
    let style = anstyle::AnsiColor::Red.on_default().bold();
    let mut text = format!("{style}error:{style:#} {error}\n");
    for cause in error.chain().skip(1) {
        text.push_str(&format!("  because: {cause}\n"));
    }
    // With stderr gone as well there is nobody left to tell; the exit code still speaks.
    let _ = anstream::stderr().write_all(text.as_bytes());
}
