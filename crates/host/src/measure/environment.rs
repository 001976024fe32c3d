//! The machine of a run, for its report, and the identity that a calibration belongs to.
//!
//! Invariant: a fact that cannot be read is `null` in the environment, never a default.

use crate::pages::{PageSettings, selected};
use crate::procfs::{Root, memory_cgroup};
use pagetax_core::calibration::Identity;
use pagetax_core::report::Environment;
use pagetax_core::units::{Bytes, PageSize};
use procfs_core::{CpuInfo, Meminfo};
use serde_json::{Map, Value, json};

/// Reads this machine's facts as they are now.
pub fn environment(root: &Root) -> Environment {
    let mut facts = Environment::new();
    let mut put = |key: &str, value: Value| facts.insert(key.into(), value);
    put("kernel", text(root, "/proc/sys/kernel/osrelease"));
    put("cpu_model", cpu_model(root).into());
    put("cpu_count", cpu_count(root).ok().into());
    put("hypervisor", hypervisor(root).into());
    put("page_table_isolation", page_table_isolation(root).ok().into());
    put("cpu_governor", text(root, "/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"));
    put("base_page_bytes", (rustix::param::page_size() as u64).into());
    let memory = root.parse::<Meminfo>("/proc/meminfo").ok();
    put("memory_bytes", memory.as_ref().map(|m| m.mem_total).into());
    put("memory_available_bytes", memory.as_ref().and_then(|m| m.mem_available).into());
    put("swap_bytes", memory.as_ref().map(|m| m.swap_total).into());
    put("swappiness", root.number("/proc/sys/vm/swappiness").ok().into());
    put("thp_enabled", chosen(root, "/sys/kernel/mm/transparent_hugepage/enabled"));
    put("thp_shmem_enabled", chosen(root, "/sys/kernel/mm/transparent_hugepage/shmem_enabled"));
    put("thp_defrag", chosen(root, "/sys/kernel/mm/transparent_hugepage/defrag"));
    put("thp_enabled_by_size", thp_by_size(root));
    put("hugetlb_pools", hugetlb_pools(root));
    put("cgroup_memory_limit_bytes", cgroup_limit(root));
    put("perf_event_paranoid", text(root, "/proc/sys/kernel/perf_event_paranoid"));
    facts
}

/// Reads the identity that a calibration of this machine belongs to. Errors name the fact that is
/// missing.
pub fn identity(root: &Root) -> Result<Identity, String> {
    Ok(Identity {
        cpu_model: cpu_model(root).ok_or("/proc/cpuinfo has no CPU model")?,
        cpu_count: cpu_count(root)?,
        kernel: root.text("/proc/sys/kernel/osrelease")?,
        memory_bytes: root.parse::<Meminfo>("/proc/meminfo")?.mem_total,
        hypervisor: hypervisor(root).ok_or("/proc/cpuinfo has no CPU flags")?,
        page_table_isolation: page_table_isolation(root)?,
    })
}

fn text(root: &Root, path: &str) -> Value {
    root.text(path).ok().into()
}

/// Returns the bracketed word of `always [madvise] never`.
fn chosen(root: &Root, path: &str) -> Value {
    selected(&root.path(path)).into()
}

fn cpu_model(root: &Root) -> Option<String> {
    let info = root.parse::<CpuInfo>("/proc/cpuinfo").ok()?;
    let model = |fields: &std::collections::HashMap<String, String>| {
        // ARM identifies parts by number.
        fields.get("model name").or_else(|| fields.get("CPU part")).cloned()
    };
    info.cpus.first().and_then(model).or_else(|| model(&info.fields))
}

fn cpu_count(root: &Root) -> Result<u32, String> {
    crate::procfs::online_cpus(root).map(|cpus| cpus.len() as u32)
}

/// Returns true in a virtual machine.
pub fn is_guest(root: &Root) -> bool {
    hypervisor(root).is_some_and(|name| name != "none")
}

/// Returns the hypervisor's name by the clock that it gives its guests; `none` on bare metal.
fn hypervisor(root: &Root) -> Option<String> {
    let info = root.text("/proc/cpuinfo").ok()?;
    let flags = info.lines().find(|line| line.starts_with("flags") || line.starts_with("Features"));
    if !flags?.split_whitespace().any(|flag| flag == "hypervisor") {
        return Some("none".into());
    }
    let clocks = "/sys/devices/system/clocksource/clocksource0/available_clocksource";
    let clocks = root.text(clocks).unwrap_or_default();
    let known = [("kvm", "kvm-clock"), ("xen", "xen"), ("hyperv", "hyperv")];
    let found = known.iter().find(|(_, clock)| clocks.contains(clock));
    Some(found.map_or("unknown", |(name, _)| name).into())
}

fn page_table_isolation(root: &Root) -> Result<bool, String> {
    let path = "/sys/devices/system/cpu/vulnerabilities/meltdown";
    // Architectures without the file do not have the flaw.
    if !root.has(path) {
        return Ok(false);
    }
    Ok(root.text(path)?.contains("PTI"))
}

fn thp_by_size(root: &Root) -> Value {
    let settings = PageSettings::at(root.path("/sys/kernel/mm"));
    let mode = |size: PageSize| {
        let word = selected(&settings.size_path(size))?;
        Some((size.to_string(), Value::from(word)))
    };
    Value::Object(settings.sizes().into_iter().filter_map(mode).collect())
}

fn hugetlb_pools(root: &Root) -> Value {
    let settings = PageSettings::at(root.path("/sys/kernel/mm"));
    let mut pools = Map::new();
    for size in settings.hugetlb_sizes() {
        let count = |name: &str| -> Option<u64> {
            let path = settings.pool_path(size).join(name);
            std::fs::read_to_string(path).ok()?.trim().parse().ok()
        };
        let pool = json!({
            "page_count": count("nr_hugepages"),
            "free_count": count("free_hugepages"),
            "overcommit_count": count("nr_overcommit_hugepages"),
        });
        pools.insert(Bytes(size.bytes()).to_string(), pool);
    }
    Value::Object(pools)
}

fn cgroup_limit(root: &Root) -> Value {
    let cgroup = memory_cgroup(root, std::process::id());
    cgroup.ok().and_then(|readings| readings.get("limit_bytes")?.value()).into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::procfs::tests::captured;

    #[test]
    fn a_captured_machine() {
        let facts = environment(&captured());
        assert_eq!(facts["cpu_count"], 2);
        assert_eq!(facts["hypervisor"], "kvm");
        assert_eq!(facts["page_table_isolation"], true);
        assert_eq!(facts["thp_enabled"], "madvise");
        assert_eq!(facts["thp_enabled_by_size"]["2M"], "inherit");
        assert_eq!(facts["thp_enabled_by_size"]["64K"], "never");
        assert_eq!(facts["hugetlb_pools"]["1G"]["page_count"], 0);
        assert_eq!(facts["cpu_governor"], Value::Null);
        let identity = identity(&captured()).unwrap();
        assert_eq!(identity.cpu_model, facts["cpu_model"]);
        assert_eq!(identity.difference(&identity.clone()), None);
    }

    #[test]
    fn nothing_is_invented() {
        let nothing = Root::at("/nonexistent");
        let facts = environment(&nothing);
        for key in ["kernel", "cpu_model", "cpu_count", "memory_bytes", "hypervisor"] {
            assert_eq!(facts[key], Value::Null, "{key}");
        }
        assert!(identity(&nothing).is_err());
    }
}
