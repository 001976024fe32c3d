//! The families of CPUs and their events, from families.toml, and the choice of one by /proc/cpuinfo.

use super::{Counted, Role};
use pagetax_core::units::PageSize;
use serde::Deserialize;
use std::collections::BTreeMap;

const FAMILIES: &str = include_str!("families.toml");

/// The code of an event for PERF_TYPE_RAW.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Code(pub u64);

/// The reason why no events are known.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FamilyError {
    /// The CPU is not in families.toml; the text identifies it.
    #[error("the TLB events of this CPU ({0}) are not in pagetax' table")]
    Unknown(String),
    /// This machine has no PMU.
    #[error(
        "this machine has no performance-monitoring unit (a virtual machine that is given none)"
    )]
    NoUnit,
    /// The file families.toml is malformed.
    #[error("families.toml: {0}")]
    Table(String),
}

/// An entry of the table: a range of CPUs with the same events.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Family {
    /// The common name of the family.
    pub name: String,
    /// The document that defines the events.
    pub source: String,
    /// Additional facts about the family's counts.
    pub note: Option<String>,
    vendor: Option<String>,
    family: Option<u32>,
    /// The last CPU family of the range; `None` if the range is one family.
    family_max: Option<u32>,
    #[serde(default)]
    models: Vec<String>,
    model_min: Option<String>,
    implementer: Option<String>,
    #[serde(default)]
    parts: Vec<String>,
    data: BTreeMap<String, Vec<String>>,
    instruction: BTreeMap<String, Vec<String>>,
    #[serde(default)]
    data_cycles: Vec<String>,
    #[serde(default)]
    instruction_cycles: Vec<String>,
}

#[derive(Deserialize)]
struct Table {
    family: Vec<Family>,
}

/// The identity of the first CPU in /proc/cpuinfo.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Identity {
    vendor: String,
    family: u32,
    model: u32,
    implementer: u32,
    part: u32,
}

/// Returns the identity of the first CPU in the text of /proc/cpuinfo.
pub fn cpu_identity(cpuinfo: &str) -> Identity {
    let value = |key: &str| {
        let line = cpuinfo.lines().find_map(|line| {
            let (name, value) = line.split_once(':')?;
            (name.trim() == key).then(|| value.trim())
        });
        line.unwrap_or("")
    };
    let hex = |key| hex(value(key).trim_start_matches("0x"));
    Identity {
        vendor: value("vendor_id").into(),
        family: value("cpu family").parse().unwrap_or(0),
        model: value("model").parse().unwrap_or(0),
        implementer: hex("CPU implementer"),
        part: hex("CPU part"),
    }
}

fn hex(text: &str) -> u32 {
    u32::from_str_radix(text, 16).unwrap_or(0)
}

impl Family {
    /// Returns all entries of the table.
    pub fn all() -> Result<Vec<Family>, FamilyError> {
        let table: Table =
            toml::from_str(FAMILIES).map_err(|error| FamilyError::Table(error.to_string()))?;
        Ok(table.family)
    }

    /// Returns the family of the CPU that a text of /proc/cpuinfo describes. Without a PMU, its model
    /// does not matter: the error is [`FamilyError::NoUnit`].
    pub fn of_cpu(cpuinfo: &str, has_unit: bool) -> Result<Family, FamilyError> {
        if has_unit { Family::find(&cpu_identity(cpuinfo)) } else { Err(FamilyError::NoUnit) }
    }

    /// Returns the family that a CPU belongs to.
    pub fn find(identity: &Identity) -> Result<Family, FamilyError> {
        let found = Family::all()?.into_iter().find(|family| family.has(identity));
        found.ok_or_else(|| {
            let Identity { vendor, family, model, implementer, part } = identity;
            FamilyError::Unknown(match vendor.is_empty() {
                true => format!("implementer {implementer:#x}, part {part:#x}"),
                false => format!("{vendor}, family {family}, model {model:#x}"),
            })
        })
    }

    fn has(&self, cpu: &Identity) -> bool {
        if let Some(implementer) = &self.implementer {
            return hex(implementer) == cpu.implementer
                && self.parts.iter().any(|part| hex(part) == cpu.part);
        }
        let first = self.family.unwrap_or(0);
        let model_min = self.model_min.as_deref().map_or(0, hex);
        self.vendor.as_deref() == Some(&cpu.vendor)
            && (first..=self.family_max.unwrap_or(first)).contains(&cpu.family)
            && (self.models.is_empty() || self.models.iter().any(|model| hex(model) == cpu.model))
            // Zen 1 has lower models of the first family.
            && (cpu.family > first || cpu.model >= model_min)
    }

    /// Returns all events to count, cycles first.
    pub fn events(&self) -> Vec<Counted> {
        let mut events = vec![Counted { role: Role::Cycles, code: None }];
        let mut add = |role: Role, codes: &[String]| {
            events.extend(codes.iter().map(|code| Counted { role, code: Some(self.code(code)) }));
        };
        for (size, codes) in &self.data {
            add(Role::Data(size.parse().ok()), codes);
        }
        for (size, codes) in &self.instruction {
            add(Role::Instruction(size.parse().ok()), codes);
        }
        add(Role::DataCycles, &self.data_cycles);
        add(Role::InstructionCycles, &self.instruction_cycles);
        events
    }

    /// Returns the page sizes that the events distinguish, smallest first; `None` stands for all sizes
    /// together.
    pub fn page_sizes(&self) -> Vec<Option<PageSize>> {
        let mut sizes: Vec<Option<PageSize>> =
            self.data.keys().chain(self.instruction.keys()).map(|size| size.parse().ok()).collect();
        sizes.sort();
        sizes.dedup();
        sizes
    }

    /// Returns true if the family counts the cycles of walks.
    pub fn has_cycles(&self) -> bool {
        !self.data_cycles.is_empty()
    }

    fn code(&self, text: &str) -> Code {
        let mut words = text.split(':').map(|word| u64::from(hex(word)));
        let mut next = || words.next().unwrap_or(0);
        let (event, umask, cmask) = (next(), next(), next());
        Code(match self.vendor.as_deref() {
            // Source: Intel SDM volume 3, IA32_PERFEVTSELx.
            Some("GenuineIntel") => event | umask << 8 | cmask << 24,
            // Source: AMD APM volume 2, PerfEvtSel. Bits 32 and up hold four more bits of the event.
            Some("AuthenticAMD") => (event & 0xff) | umask << 8 | (event >> 8) << 32 | cmask << 24,
            _ => event,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_sound() {
        for family in Family::all().unwrap() {
            assert!(!family.source.is_empty() && !family.data.is_empty(), "{}", family.name);
            let events = family.events();
            for (nth, event) in events.iter().enumerate() {
                assert!(event.code.is_none_or(|code| code.0 != 0), "{}", family.name);
                assert!(events[..nth].iter().all(|e| e.code != event.code), "{}", family.name);
            }
        }
    }

    #[test]
    fn who_has_no_unit_is_not_told_of_the_table() {
        let unlisted = "vendor_id : GenuineIntel\ncpu family : 15\nmodel : 107\n";
        let error = |has_unit| Family::of_cpu(unlisted, has_unit).unwrap_err().to_string();
        assert!(error(false).contains("no performance-monitoring unit"), "{}", error(false));
        assert!(error(true).contains("family 15, model 0x6b"), "{}", error(true));
    }

    #[test]
    fn codes_are_those_of_the_manuals() {
        let intel = Family { vendor: Some("GenuineIntel".into()), ..Family::default() };
        assert_eq!(intel.code("12:10:1"), Code(0x0100_1012));
        let amd = Family { vendor: Some("AuthenticAMD".into()), ..Family::default() };
        assert_eq!(amd.code("45:f0"), Code(0xf045));
        assert_eq!(amd.code("187:1"), Code(0x1_0000_0187));
        assert_eq!(Family::default().code("8138"), Code(0x8138));
    }

    #[test]
    fn cpus_find_their_family() {
        let find = |text: &str| Family::find(&cpu_identity(text)).map(|family| family.name);
        let intel =
            |model| format!("vendor_id\t: GenuineIntel\ncpu family\t: 6\nmodel\t\t: {model}\n");
        assert_eq!(find(&intel(85)).unwrap(), "Intel Skylake to Cascade Lake");
        assert!(find(&intel(143)).unwrap().contains("Sapphire Rapids"));
        assert!(find(&intel(1)).unwrap_err().to_string().contains("model 0x1"));
        let amd = |family, model| {
            format!("vendor_id : AuthenticAMD\ncpu family : {family}\nmodel : {model}\n")
        };
        assert!(find(&amd(23, 0x31)).is_ok() && find(&amd(26, 2)).is_ok());
        assert!(find(&amd(23, 1)).is_err(), "Zen 1");
        assert!(find("CPU implementer : 0x41\nCPU part : 0xd84\n").unwrap().contains("V3"));
    }
}
