//! The built-in machine models, and the lookup of a model by name or path.

use crate::model::{Model, ModelError};

/// The name and text of each file in `machines/`.
const BUILTIN: &[(&str, &str)] = &[
    ("alpha-nms", include_str!("../../../machines/alpha-nms.toml")),
    ("linux-2.4.13-2gb", include_str!("../../../machines/linux-2.4.13-2gb.toml")),
    ("linux-2.4.13-3.5gb", include_str!("../../../machines/linux-2.4.13-3.5gb.toml")),
    ("linux-2.4.13-ac4-2gb", include_str!("../../../machines/linux-2.4.13-ac4-2gb.toml")),
    ("linux-2.4.13-ac4-3.5gb", include_str!("../../../machines/linux-2.4.13-ac4-3.5gb.toml")),
    ("linux-2.4.9-2gb", include_str!("../../../machines/linux-2.4.9-2gb.toml")),
    (
        "linux-2.4.9-2gb-second-run",
        include_str!("../../../machines/linux-2.4.9-2gb-second-run.toml"),
    ),
    (
        "linux-2.4.9-2gb-sleep-patch",
        include_str!("../../../machines/linux-2.4.9-2gb-sleep-patch.toml"),
    ),
    ("linux-2.4.9-3.5gb", include_str!("../../../machines/linux-2.4.9-3.5gb.toml")),
    (
        "linux-2.4.9-3.5gb-sleep-patch",
        include_str!("../../../machines/linux-2.4.9-3.5gb-sleep-patch.toml"),
    ),
    ("sparcstation-1", include_str!("../../../machines/sparcstation-1.toml")),
    ("sparcstation-1-nosched", include_str!("../../../machines/sparcstation-1-nosched.toml")),
    ("sparcstation-1-pmeg-patch", include_str!("../../../machines/sparcstation-1-pmeg-patch.toml")),
    (
        "sparcstation-1-shared-pmegs",
        include_str!("../../../machines/sparcstation-1-shared-pmegs.toml"),
    ),
    ("sparcstation-1plus", include_str!("../../../machines/sparcstation-1plus.toml")),
    (
        "sparcstation-1plus-pmeg-patch",
        include_str!("../../../machines/sparcstation-1plus-pmeg-patch.toml"),
    ),
    ("sparcstation-2", include_str!("../../../machines/sparcstation-2.toml")),
    ("sun-4-1xx", include_str!("../../../machines/sun-4-1xx.toml")),
    ("sun-4-2xx", include_str!("../../../machines/sun-4-2xx.toml")),
    ("sun-4-3xx", include_str!("../../../machines/sun-4-3xx.toml")),
    ("sun-4-460", include_str!("../../../machines/sun-4-460.toml")),
    ("sun-4-4xx", include_str!("../../../machines/sun-4-4xx.toml")),
    ("ultrasparc-2-450", include_str!("../../../machines/ultrasparc-2-450.toml")),
    ("ultrasparc-3-750", include_str!("../../../machines/ultrasparc-3-750.toml")),
    ("ultrasparc-3plus-900", include_str!("../../../machines/ultrasparc-3plus-900.toml")),
    ("ice-lake-sp", include_str!("../../../machines/ice-lake-sp.toml")),
    ("sapphire-rapids", include_str!("../../../machines/sapphire-rapids.toml")),
    ("zen-4", include_str!("../../../machines/zen-4.toml")),
    ("zen-5", include_str!("../../../machines/zen-5.toml")),
    ("x86-64-calibrated", include_str!("../../../machines/x86-64-calibrated.toml")),
];

/// Returns the names of the built-in models.
pub fn names() -> impl Iterator<Item = &'static str> {
    BUILTIN.iter().map(|(name, _)| *name)
}

/// Returns the text of a built-in model's file.
pub fn text(name: &str) -> Option<&'static str> {
    BUILTIN.iter().find(|(known, _)| *known == name).map(|(_, text)| *text)
}

/// Returns a built-in model by name, or one from a file when there is a `/` in it or it ends in `.toml`.
///
/// # Errors
/// Fails if the name or path does not exist, or the file is no model.
pub fn find(name: &str) -> Result<Model, ModelError> {
    if name.contains('/') || name.ends_with(".toml") {
        let text = std::fs::read_to_string(name)
            .map_err(|error| ModelError::Read { file: name.into(), error })?;
        let stem = std::path::Path::new(name).file_stem().and_then(|stem| stem.to_str());
        let mut model = Model::parse(stem.unwrap_or(name), &text, self::text)?;
        // A file may claim any job, but only built-in models were compared with published figures.
        model.validated_jobs.clear();
        return Ok(model);
    }
    let text = text(name).ok_or_else(|| ModelError::Unknown {
        name: name.into(),
        known: names().collect::<Vec<_>>().join(", "),
    })?;
    Model::parse(name, text, self::text)
}
