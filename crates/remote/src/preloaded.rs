//! What `pagetax remote` tells the library that it preloads: by the environment, so that it outlives
//! exec.

use crate::store::embedded::EmbeddedStore;
use crate::store::{PageStore, StoreError};
use pagetax_core::units::Bytes;
use std::sync::Arc;
use std::time::Duration;

const RESIDENT: &str = "PAGETAX_REMOTE_RESIDENT";
const ADDRESS_SPACE: &str = "PAGETAX_REMOTE_ADDRESS_SPACE";
const SPIN_US: &str = "PAGETAX_REMOTE_SPIN_US";
const STATS: &str = "PAGETAX_REMOTE_STATS";
const EMBEDDED: &str = "PAGETAX_REMOTE_EMBEDDED";

/// How a process is to be paged.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    /// Most bytes of each process in this machine's memory.
    pub resident: Bytes,
    /// Addresses to give out, at most 16 TiB.
    pub address_space: Bytes,
    /// How long handlers look for the next fault before they sleep.
    pub spin: Duration,
    /// Room of the compressed store inside the process.
    pub embedded: Bytes,
    /// Say at the end what was paged.
    pub stats: bool,
}

impl Settings {
    /// With so much resident, and defaults.
    pub fn resident(resident: Bytes) -> Settings {
        Settings {
            resident,
            address_space: Bytes(1 << 40),
            spin: Duration::ZERO,
            embedded: Bytes(64 << 30),
            stats: false,
        }
    }

    /// As variables and their values.
    pub fn to_environment(&self) -> Vec<(&'static str, String)> {
        vec![
            (RESIDENT, self.resident.0.to_string()),
            (ADDRESS_SPACE, self.address_space.0.to_string()),
            (SPIN_US, self.spin.as_micros().to_string()),
            (EMBEDDED, self.embedded.0.to_string()),
            (STATS, u64::from(self.stats).to_string()),
        ]
    }

    /// As this process was told; none if it was not.
    ///
    /// # Errors
    /// With a line for people, when a variable holds something else than a number.
    pub fn from_environment() -> Result<Option<Settings>, String> {
        let Some(resident) = variable(RESIDENT)? else { return Ok(None) };
        let mut settings = Settings::resident(Bytes(resident));
        if let Some(bytes) = variable(ADDRESS_SPACE)? {
            settings.address_space = Bytes(bytes);
        }
        if let Some(micros) = variable(SPIN_US)? {
            settings.spin = Duration::from_micros(micros);
        }
        if let Some(bytes) = variable(EMBEDDED)? {
            settings.embedded = Bytes(bytes);
        }
        settings.stats = variable(STATS)?.is_some_and(|wanted| wanted > 0);
        Ok(Some(settings))
    }

    /// The store that these settings name.
    ///
    /// # Errors
    /// Of the store.
    pub fn open_store(&self) -> Result<Arc<dyn PageStore>, StoreError> {
        Ok(Arc::new(EmbeddedStore::new(self.embedded)))
    }
}

fn variable(name: &str) -> Result<Option<u64>, String> {
    match std::env::var(name) {
        Err(_) => Ok(None),
        Ok(text) => match text.parse() {
            Ok(number) => Ok(Some(number)),
            Err(_) => Err(format!("{name}={text}: write a number, or run `pagetax remote`")),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_setting_has_its_variable() {
        let settings = Settings::resident(Bytes(1 << 20));
        let names: std::collections::BTreeSet<_> =
            settings.to_environment().into_iter().map(|(name, _)| name).collect();
        assert_eq!(names.len(), 5);
        assert!(names.iter().all(|name| name.starts_with("PAGETAX_REMOTE_")));
    }
}
