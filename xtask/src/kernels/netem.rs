//! The part `netem`: page-ins and rewrites over links that lose, reorder and repeat packets. This machine's
//! kernel may lack netem; a guest of Debian has it.

use super::small::between;
use super::{SmallGuest, fetch};
use crate::{book, packages, shell};
use anyhow::{Context, Result, ensure};
use serde_json::Value;

const VERSION: &str = "6.12";
const LIMIT: u32 = 1200;
const TOUCH: &str = "target/release/examples/touch";
/// The modules of the guest's kernel: a pair of network devices, and the link's faults.
const MODULES: [&str; 2] = ["veth.ko", "sch_netem.ko"];
const PROGRAMS: [(&str, &str); 2] = [("/sbin/ip", "iproute2"), ("/sbin/tc", "iproute2")];
/// The links: a name, and the words of `tc qdisc … netem` for each direction.
const LINKS: [(&str, &str); 5] = [
    ("sound", "limit 10000"),
    ("1 % of packets lost", "loss 1%"),
    ("5 % lost", "loss 5%"),
    ("1 ms late, but a quarter at once", "delay 1ms reorder 25% 50%"),
    ("the same, 1 % lost, 1 % repeated", "delay 1ms reorder 25% 50% loss 1% duplicate 1%"),
];

/// Boots the guest. Fails unless each program came to its end, which it does only with the right bytes.
pub fn run(writes: bool) -> Result<()> {
    packages::provide_files(PROGRAMS.iter())?;
    let pagetax = shell::pagetax()?;
    let touch = ["build", "--quiet", "--release", "-p", "pagetax-remote", "--example", "touch"];
    shell::cargo(&touch)?;
    let links = LINKS.map(|(_, words)| format!("'{words}'")).join(" ");
    let text = SmallGuest {
        kernel: &fetch::kernel(VERSION)?,
        script: &format!("set -- {links}\n{}", include_str!("netem.sh")),
        programs: &[&pagetax, TOUCH, PROGRAMS[0].0, PROGRAMS[1].0, "/usr/bin/timeout"],
        modules: &MODULES,
        memory: &["-m", "1024"],
        limit: LIMIT,
        ..SmallGuest::default()
    }
    .run()?;
    let mut rows = Vec::new();
    for (nth, (name, _)) in LINKS.iter().enumerate() {
        let measured = |what: &str| -> Result<Value> {
            let json = between(&text, &format!("@@{} {what}\n", nth + 1), "@@")?;
            serde_json::from_str(json.trim()).with_context(|| format!("{name}, {what}:\n{text}"))
        };
        let ms = |json: &Value, key: &str| -> Result<String> {
            let ns = json.pointer(key).and_then(Value::as_f64).with_context(|| key.to_string())?;
            Ok(format!("{:.1}", ns / 1e6))
        };
        let mut row = vec![name.to_string()];
        for copies in ["cold 1", "cold 2"] {
            let cold = measured(copies)?;
            row.push(format!("{}, {}", ms(&cold, "/p50_ns")?, ms(&cold, "/p99_ns")?));
        }
        let rewrite = &measured("paged")?["rewrite"];
        row.push(format!("{}, {}", ms(rewrite, "/p50_ns")?, ms(rewrite, "/p99_ns")?));
        rows.push(row);
    }
    ensure!(!text.contains("panicked"), "{text}");
    const HEADINGS: [&str; 4] = [
        "each way",
        "cold page-in, 1 copy: p50, p99 ms",
        "2 copies",
        "rewrite that faults, 2 copies",
    ];
    let table = book::table(&HEADINGS, &rows);
    println!("Linux {VERSION}\n{table}");
    if writes {
        book::write("cargo xtask kernels --only netem --write", &format!("\n{table}\n"))?;
    }
    Ok(())
}
