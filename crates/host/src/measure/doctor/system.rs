//! Limits, swap and privileges.

use crate::procfs::{Root, memory_cgroup};
use pagetax_core::finding::{Feature, Finding, Standing};
use pagetax_core::units::Bytes;
use procfs_core::process::Status;
use rustix::process::{Resource, getrlimit};

/// The capabilities that matter here: number, name, and the feature that needs it.
const CAPABILITIES: [(u32, &str, &str); 5] = [
    (14, "cap_ipc_lock", "locking more than the limit"),
    (21, "cap_sys_admin", "settings and mounts"),
    (23, "cap_sys_nice", "page sizes of other processes"),
    (24, "cap_sys_resource", "raising limits"),
    (38, "cap_perfmon", "kernel stacks"),
];

pub(super) fn findings(root: &Root) -> Vec<Finding> {
    vec![memory_groups(root), swap(root), compressed_swap(root), locking(), capabilities(root)]
}

fn memory_groups(root: &Root) -> Finding {
    let feature = Feature("memory_cgroup", "limiting and accounting a job's memory");
    let pid = std::process::id();
    let version = match root.text(&format!("/proc/{pid}/cgroup")) {
        Ok(text) if text.lines().any(|l| l.split(':').nth(1).is_some_and(|c| c == "memory")) => 1,
        _ => 2,
    };
    let cgroup = match memory_cgroup(root, pid) {
        Ok(cgroup) => cgroup,
        Err(why) => {
            let enable = "add cgroup_enable=memory to the kernel's command line and reboot";
            return feature.not_here(why, enable);
        }
    };
    let limit = match cgroup.get("limit_bytes").and_then(|reading| reading.value()) {
        Some(bytes) => format!("limit {}", Bytes(bytes)),
        None => "no limit".into(),
    };
    let detail = format!("version {version}, {} accounts, {limit}", cgroup.len());
    let folder = if version == 1 { "/sys/fs/cgroup/memory" } else { "/sys/fs/cgroup" };
    match rustix::fs::access(root.path(folder), rustix::fs::Access::WRITE_OK) {
        Ok(()) => feature.works(detail),
        Err(_) => feature.limited(
            format!("{detail}; groups cannot be made by this user"),
            "systemd-run --user --scope -p MemoryMax=1G pagetax run JOB",
        ),
    }
}

fn swap(root: &Root) -> Finding {
    let feature = Feature("swap", "paging to a device");
    match root.text("/proc/swaps") {
        Ok(text) if text.lines().count() > 1 => {
            let devices: Vec<_> =
                text.lines().skip(1).filter_map(|line| line.split_whitespace().next()).collect();
            feature.works(devices.join(", "))
        }
        Ok(_) => feature.not_here(
            "no swap device is in use",
            "sudo sh -c 'fallocate -l 1G /swapfile && chmod 600 /swapfile && mkswap /swapfile && \
             swapon /swapfile'",
        ),
        Err(why) => feature.never_here(why),
    }
}

fn compressed_swap(root: &Root) -> Finding {
    const ENABLE: &str = "sudo sh -c 'modprobe zram && device=$(zramctl --find --size 1G) && \
                          mkswap $device && swapon $device'";
    let feature = Feature("compressed_swap", "paging to compressed memory (zram, zswap)");
    if root.text("/sys/module/zswap/parameters/enabled").is_ok_and(|text| text == "Y") {
        return feature.works("zswap is on");
    }
    let swaps = root.text("/proc/swaps").unwrap_or_default();
    let devices: Vec<String> =
        root.names("/sys/block").into_iter().filter(|name| name.starts_with("zram")).collect();
    match devices.iter().find(|device| swaps.contains(&format!("/dev/{device} "))) {
        Some(device) => feature.works(format!("/dev/{device} is in use")),
        None if devices.is_empty() => feature.not_here("no zram device", ENABLE),
        None => feature.not_here(format!("{} is there, but no swap", devices.join(", ")), ENABLE),
    }
}

fn locking() -> Finding {
    let feature = Feature("locking", "locking memory (mlock)");
    match getrlimit(Resource::Memlock).current {
        None => feature.works("no limit"),
        Some(_) if rustix::process::geteuid().is_root() => {
            feature.works("root may lock beyond the limit")
        }
        Some(bytes) => feature.limited(
            format!("at most {}", Bytes(bytes)),
            "sudo prlimit --pid $$ --memlock=unlimited",
        ),
    }
}

fn capabilities(root: &Root) -> Finding {
    let feature = Feature("capabilities", "privileges of this process");
    let status = match root.parse::<Status>(&format!("/proc/{}/status", std::process::id())) {
        Ok(status) => status,
        Err(why) => return feature.never_here(why),
    };
    let lacking: Vec<_> =
        CAPABILITIES.iter().filter(|(number, ..)| status.capeff & (1 << number) == 0).collect();
    if lacking.is_empty() {
        return feature.works("all that are of use here");
    }
    let names: Vec<_> = lacking.iter().map(|(_, name, _)| *name).collect();
    let uses: Vec<_> = lacking.iter().map(|(_, name, what)| format!("{name} ({what})")).collect();
    let detail = format!("without {}", uses.join(", "));
    let enable = format!("sudo setcap {}=ep \"$(command -v pagetax)\"", names.join(","));
    match rustix::process::geteuid().is_root() {
        // Root in a container: the container's configuration sets its bounding set.
        true => feature.finding(
            Standing::Limited,
            detail,
            Some(format!(
                "start the container with --cap-add={}",
                names.join(",").to_uppercase().replace("CAP_", "")
            )),
        ),
        false => feature.limited(detail, enable),
    }
}
