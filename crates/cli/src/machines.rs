//! `pagetax machines`: what jobs can run on, and where every subcommand finds the machine it is
//! given.

use crate::output::documents::Outputs;
use crate::output::report::{label, trust};
use crate::output::text;
use crate::{exit, output};
use anyhow::{Result, anyhow};
use pagetax_core::catalog::{MachineCatalog, MachineEntry};
use pagetax_core::job::nearest;
use pagetax_core::machine::{Machine, MachineKind, MachineSpec};
use pagetax_core::report::ReportMachine;
use pagetax_host::run::guard::Limits;
use pagetax_host::run::{HostMachine, NullMachine, OpenNetwork};
use pagetax_remote::pager::{JobMemory, Log};
use pagetax_remote::store::PageStore;
use pagetax_sim::historic::machine::SimMachine;
use pagetax_sim::model::Model;
use pagetax_sim::{hardware::calibrated, models};
use std::process::ExitCode;
use std::sync::Arc;

const EXAMPLES: &str = "\
Examples:
  pagetax machines                     list what jobs can run on
  pagetax machines host                memory and page sizes of this machine
  pagetax machines sparcstation-1      every constant of a model, with its source";

/// The limits of jobs on this machine, and the store of their network memory.
#[derive(Debug, Clone, Default)]
pub struct Here {
    /// The limits of locks and of free memory.
    pub limits: Limits,
    /// The store; without one, pages are compressed inside the process.
    pub store: Option<Arc<dyn PageStore>>,
}

/// In front of the names of simulated machines.
const SIM: &str = "sim:";

/// Native machines: name, meaning, maker.
type Native = (&'static str, &'static str, fn(&Here) -> Box<dyn Machine>);
const NATIVE: &[Native] = &[
    ("host", "this machine, by real system calls", |here| {
        let store = here.store.clone();
        let open_network: OpenNetwork = Arc::new(move |room| {
            let log: Option<Log> = Some(Arc::new(|line: &str| output::note(line)));
            Arc::new(match &store {
                Some(store) => JobMemory::new(store.clone(), log),
                None => JobMemory::embedded(room, log),
            })
        });
        Box::new(HostMachine::with_limits(here.limits).with_network(open_network))
    }),
    ("null", "every access is generated and none made", |_| Box::new(NullMachine)),
];

/// List the machines that jobs can run on, or show one
#[derive(Debug, clap::Args)]
#[command(before_help = EXAMPLES)]
pub struct Args {
    /// Print what is known of this machine; any that `run --on` takes
    #[arg(value_name = "NAME", conflicts_with = "json")]
    machine: Option<String>,

    #[command(flatten)]
    outputs: Outputs<MachineCatalog>,
}

/// Runs `pagetax machines [NAME]`.
pub fn run(args: Args) -> Result<ExitCode> {
    match args.machine {
        None => args.outputs.print(&catalog(), list)?,
        Some(machine) => output::print(&show(&machine)?)?,
    }
    Ok(exit::FINE.into())
}

/// Returns the machine of this name: `host`, `null`, `sim:MODEL` or `sim:FILE.toml`. A built-in model needs
/// no `sim:`.
///
/// # Errors
/// For unknown names, with the nearest known one, and for models that are no possible machine.
pub fn open(name: &str) -> Result<Box<dyn Machine>> {
    open_here(name, &Here::default())
}

/// Does the same as [`open`], with these limits and this store for the real machine.
pub fn open_here(name: &str, here: &Here) -> Result<Box<dyn Machine>> {
    if let Some((.., make)) = NATIVE.iter().find(|(known, ..)| *known == name) {
        return Ok(make(here));
    }
    match model_name(name) {
        Some(model) => Ok(Box::new(SimMachine::new(model_of(model, name)?)?)),
        None => Err(unknown(name)),
    }
}

/// Returns the name of a machine as reports have it: that of a built-in model with `sim:`.
pub fn full_name(name: &str) -> String {
    model_name(name).map_or(name.into(), |model| format!("{SIM}{model}"))
}

/// Returns the model that the name of a simulated machine contains.
pub fn model_name(name: &str) -> Option<&str> {
    name.strip_prefix(SIM).or_else(|| models::text(name).map(|_| name))
}

/// Returns a model by name, or from a file. The model of this machine takes its costs from the calibration,
/// if there is one.
pub fn model_of(model: &str, name: &str) -> Result<Model> {
    let is_file = model.contains('/') || model.ends_with(".toml");
    if !is_file && models::text(model).is_none() {
        return Err(unknown(name));
    }
    let mut model = models::find(model)?;
    if model.name == calibrated::MODEL
        && let Ok(calibration) = pagetax_host::measure::calibrate::cached()
    {
        output::detail(|| format!("costs of {name}: from this machine's calibration"));
        calibrated::apply(&mut model, &calibration)?;
    }
    Ok(model)
}

fn unknown(name: &str) -> anyhow::Error {
    let known: Vec<String> = NATIVE
        .iter()
        .map(|(known, ..)| known.to_string())
        .chain(models::names().map(|model| format!("{SIM}{model}")))
        .collect();
    let remedy = match nearest(name, known.iter().map(String::as_str)) {
        Some(near) => format!("did you mean `{near}`?"),
        None => "`pagetax machines` lists them".into(),
    };
    anyhow!("no machine is called `{name}`\n  hint: {remedy}")
}

fn catalog() -> MachineCatalog {
    let native = NATIVE.iter().map(|(_, title, make)| MachineEntry {
        machine: report_machine(&make(&Here::default()).spec()),
        title: title.to_string(),
    });
    let simulated = models::names().filter_map(|name| models::find(name).ok()).map(|model| {
        let validated = !model.validated_jobs.is_empty();
        let name = format!("{SIM}{}", model.name);
        let machine = ReportMachine { name, kind: MachineKind::Sim, validated };
        MachineEntry { machine, title: model.title }
    });
    MachineCatalog { machines: native.chain(simulated).collect() }
}

fn list(catalog: &MachineCatalog) -> String {
    let row = |entry: &MachineEntry| {
        vec![entry.machine.name.clone(), label(&entry.machine).into(), entry.title.clone()]
    };
    let rows = catalog.machines.iter().map(row).collect();
    text::table(&["machine", "its numbers", "what it is"], &[], rows)
        + "\nRun a job on some with `pagetax run JOB --on MACHINE,…`.\n"
}

fn report_machine(spec: &MachineSpec) -> ReportMachine {
    let validated = spec.kind != MachineKind::Sim || !spec.validated_jobs.is_empty();
    ReportMachine { name: spec.name.clone(), kind: spec.kind, validated }
}

/// Renders a machine's facts and the constants of its model.
fn show(name: &str) -> Result<String> {
    let mut out = show_spec(&open(name)?.spec());
    if let Some(model) = model_name(name) {
        let model = model_of(model, name)?;
        out += &text::heading(&model.title);
        let rows = model.constants().map(|(table, key, constant)| {
            let value = constant.value.to_string().trim_matches('"').to_string();
            vec![format!("{table}.{key}"), value, constant.unit.clone(), constant.source.clone()]
        });
        out += &text::table(&["constant", "value", "unit", "source"], &[1], rows.collect());
    }
    Ok(out)
}

/// Describes the trust in a machine's numbers, with the jobs that it was checked with.
fn trust_of(spec: &MachineSpec) -> String {
    match spec.validated_jobs.as_slice() {
        [] => trust(&report_machine(spec)).into(),
        jobs => format!("modeled, checked against published figures of {}", jobs.join(" and ")),
    }
}

fn show_spec(spec: &MachineSpec) -> String {
    let MachineSpec { name, memory, base_page, page_sizes, cpus, .. } = spec;
    let sizes: Vec<_> = page_sizes.iter().map(ToString::to_string).collect();
    let rows = [
        ("machine", name.clone()),
        ("its numbers are", trust_of(spec)),
        ("memory", memory.to_string()),
        ("CPUs", cpus.to_string()),
        ("base page", base_page.to_string()),
        ("page sizes", sizes.join(", ")),
    ];
    text::table(&["", ""], &[], rows.into_iter().map(|(k, v)| vec![k.into(), v]).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_needs_no_prefix() {
        for model in models::names() {
            assert_eq!(full_name(model), format!("{SIM}{model}"));
            assert_eq!(show(model).unwrap(), show(&full_name(model)).unwrap());
        }
        assert_eq!(full_name("sim:./mine.toml"), "sim:./mine.toml");
        assert_eq!(full_name("host"), "host");
        assert!(open("sparcstation").is_err());
    }
    use pagetax_core::job::Job;
    use pagetax_core::plan::{Advice, Op, Plan, RegionId};
    use pagetax_core::report::Recording;
    use pagetax_core::units::Nanos;

    const JOB: &str = "name = \"t\"\n[[region]]\nname = \"r\"\nsize = \"1M\"\n[[phase]]\n\
                       name = \"p\"\nops = [{ touch = \"r\", access = \"write\" }]\n";

    /// Changes of a valid plan that each make it invalid.
    const MISTAKES: [fn(&mut Plan); 5] = [
        |plan| plan.measure.interval = Some(Nanos(0)),
        |plan| plan.native.flip_byte_at = Some(1 << 30),
        |plan| plan.phases[0].ops.insert(0, Op::Unmap(RegionId(0))),
        |plan| plan.phases[0].ops.insert(0, Op::Map(RegionId(0))),
        |plan| {
            let lock = Op::Lock { region: RegionId(0), chunk_bytes: 4096 };
            let advice = Op::Advise { region: RegionId(0), advice: Advice::Dontneed };
            plan.phases[0].ops.splice(0..0, [lock, advice]);
        },
    ];

    #[test]
    fn all_machines_refuse_an_invalid_plan_in_the_same_words() {
        let native = NATIVE.iter().map(|(name, ..)| name.to_string());
        let names: Vec<_> =
            native.chain(models::names().map(|model| format!("{SIM}{model}"))).collect();
        let refusal = |name: &str, break_plan: fn(&mut Plan)| {
            let machine = open(name).unwrap();
            let job = Job::parse(JOB, "t.toml").unwrap();
            let mut plan = job.resolve(&Default::default(), &machine.spec(), None).unwrap();
            break_plan(&mut plan);
            let mut recording = Recording::new(&plan, &machine.spec());
            let (checked, ran) = (machine.preflight(&plan), machine.run(&plan, &mut recording));
            let (checked, ran) = (checked.unwrap_err().to_string(), ran.unwrap_err().to_string());
            assert_eq!(checked, ran, "{name}");
            checked
        };
        assert!(names.len() > 10, "{names:?}");
        for break_plan in MISTAKES {
            let host = refusal("host", break_plan);
            names.iter().for_each(|name| assert_eq!(refusal(name, break_plan), host, "{name}"));
        }
    }
}
