//! Any text evaluates to a finite quantity of at least zero, or is refused. Nothing panics.
#![no_main]

use libfuzzer_sys::fuzz_target;
use pagetax_core::quantity::{Params, evaluate};

fuzz_target!(|texts: (&str, &str)| {
    let params: Params = [("a".into(), texts.1.into()), ("b".into(), "$a / 2".into())].into();
    if let Ok(quantity) = evaluate(texts.0, &params) {
        assert!(quantity.value.is_finite() && quantity.value >= 0.0);
    }
});
