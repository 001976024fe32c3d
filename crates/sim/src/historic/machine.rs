//! `sim:NAME`: hardware, kernel and engine, composed from a model.
//!
//! Invariant: a machine keeps nothing from one run to the next. Each run starts from the same pristine
//! hardware and kernel.

use crate::hardware::Mmu;
use crate::hardware::flat::Flat;
use crate::hardware::sun4::{Geometry, Sun4};
use crate::historic::engine::{Caps, Engine, Parts, Settings};
use crate::historic::kernel::Kernel;
use crate::historic::kernel::linux24::{self, Linux24};
use crate::historic::kernel::pager::Pager;
use crate::historic::kernel::pager::model::PagerModel;
use crate::historic::kernel::solaris;
use crate::historic::kernel::sunos::SunOs;
use crate::historic::kernel::sunos::config::SunOsConfig;
use crate::historic::kernel::thp;
use crate::historic::sched::scheduler;
use crate::model::{Model, ModelError};
use crate::models;
use pagetax_core::machine::{Machine, MachineKind, MachineSpec, RunError, Sink, Unmet};
use pagetax_core::plan::Plan;
use pagetax_core::report::{Environment, Warning};
use pagetax_core::units::PageSize;

/// A simulated machine.
pub struct SimMachine {
    model: Model,
    settings: Settings,
    pristine: Box<dyn Pristine>,
    /// The limits that end a run early.
    pub caps: Caps,
}

/// Hardware and kernel of one kind, in their state after booting.
trait Pristine: Send + Sync {
    fn page_sizes(&self, base: PageSize) -> Vec<PageSize>;
    fn unmet_requirements(&self, plan: &Plan) -> Vec<Unmet>;
    fn run(&self, machine: &SimMachine, plan: &Plan, out: &mut dyn Sink) -> Result<(), RunError>;
}

struct Booted<M, K> {
    hardware: M,
    kernel: K,
}

impl<M, K> Pristine for Booted<M, K>
where
    M: Mmu + Clone + Send + Sync,
    K: Kernel<M> + Clone + Send + Sync,
{
    fn page_sizes(&self, base: PageSize) -> Vec<PageSize> {
        self.kernel.page_sizes(base)
    }

    fn unmet_requirements(&self, plan: &Plan) -> Vec<Unmet> {
        self.kernel.unmet_requirements(plan)
    }

    fn run(&self, machine: &SimMachine, plan: &Plan, out: &mut dyn Sink) -> Result<(), RunError> {
        let broken = |error: ModelError| RunError::Op {
            op: "start".into(),
            why: error.to_string(),
            remedy: "correct the model".into(),
        };
        let mut kernel = self.kernel.clone();
        kernel.prepare(plan);
        let parts = Parts {
            settings: &machine.settings,
            caps: machine.caps,
            hardware: self.hardware.clone(),
            kernel,
            scheduler: scheduler(&machine.model).map_err(broken)?,
        };
        Engine::run(parts, plan, out)
    }
}

/// Returns the kernel that a model names, on its hardware.
fn boot(model: &Model, settings: &Settings) -> Result<Box<dyn Pristine>, ModelError> {
    match model.kernel.as_str() {
        "sunos" => {
            let geometry = Geometry::load(model, settings.page)?;
            let mut hardware = Sun4::new(geometry);
            let config = SunOsConfig::load(model, &geometry)?;
            let kernel = SunOs::new(config, settings.memory, &mut hardware);
            Ok(Box::new(Booted { hardware, kernel }))
        }
        "pager" => {
            let hardware = Flat::new(settings.page);
            let kernel = Pager::new(PagerModel::read(model, settings.page)?);
            Ok(Box::new(Booted { hardware, kernel }))
        }
        "linux24" => {
            let hardware = Flat::new(settings.page);
            let kernel = Linux24::new(linux24::Linux24Config::new(model)?);
            Ok(Box::new(Booted { hardware, kernel }))
        }
        "solaris" => {
            let cpus = settings.cpus as usize;
            let (hardware, kernel) = solaris::build(model, settings.memory, cpus)?;
            Ok(Box::new(Booted { hardware, kernel }))
        }
        "thp" => {
            let (hardware, kernel) = thp::build(model, settings.memory, settings.cpus as usize)?;
            Ok(Box::new(Booted { hardware, kernel }))
        }
        other => Err(ModelError::Constant {
            file: format!("{}.toml", model.name),
            key: "kernel".into(),
            problem: format!("is `{other}`, which is not known"),
            remedy: "use one of linux24, pager, solaris, sunos, thp".into(),
        }),
    }
}

impl SimMachine {
    /// Returns a built-in machine, or one from a file (see [`models::find`]).
    ///
    /// # Errors
    /// Fails if there is no such model, or it describes no possible machine.
    pub fn find(name: &str) -> Result<Self, ModelError> {
        SimMachine::new(models::find(name)?)
    }

    /// Returns the machine of a model.
    ///
    /// # Errors
    /// Fails if a constant is absent, superfluous or impossible.
    pub fn new(model: Model) -> Result<Self, ModelError> {
        let settings = Settings::load(&model)?;
        scheduler(&model)?;
        let pristine = boot(&model, &settings)?;
        model.finish()?;
        Ok(SimMachine { model, settings, pristine, caps: Caps::default() })
    }

    /// Returns the machine's model.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// Warns if no published figures back the result, and of known limits of the model.
    fn what_is_not_shown(&self, plan: &Plan) -> Vec<Warning> {
        let Model { title, validated_jobs, limits, .. } = &self.model;
        let unchecked = match validated_jobs.as_slice() {
            [] => Some(format!("{title}: not validated: no published figure backs it")),
            jobs if jobs.contains(&plan.job.name) => None,
            jobs => Some(format!(
                "{title}: not validated for {}: published figures back it with {} only",
                plan.job.name,
                jobs.join(" and ")
            )),
        };
        let unchecked = unchecked.map(|text| Warning {
            id: "not_validated".into(),
            text,
            remedy: "take its figures as an extrapolation from the machines that are".into(),
        });
        let limits = limits.as_ref().map(|limits| Warning {
            id: "model_limits".into(),
            text: format!("{title}: {limits}"),
            remedy: "draw no conclusion from this model about that".into(),
        });
        [unchecked, limits].into_iter().flatten().collect()
    }
}

impl Machine for SimMachine {
    fn spec(&self) -> MachineSpec {
        MachineSpec {
            name: self.model.name.clone(),
            kind: MachineKind::Sim,
            validated_jobs: self.model.validated_jobs.clone(),
            memory: self.settings.memory,
            base_page: self.settings.page,
            page_sizes: self.pristine.page_sizes(self.settings.page),
            cpus: self.settings.cpus,
            job_params: self.model.job_params.clone(),
        }
    }

    fn limits(&self, plan: &Plan) -> Vec<Unmet> {
        self.pristine.unmet_requirements(plan)
    }

    fn execute(&self, plan: &Plan, out: &mut dyn Sink) -> Result<(), RunError> {
        out.environment(Environment::from([
            ("model".into(), self.model.title.clone().into()),
            ("memory_bytes".into(), self.settings.memory.0.into()),
            ("page_bytes".into(), self.settings.page.bytes().into()),
            ("cpus".into(), self.settings.cpus.into()),
        ]));
        self.what_is_not_shown(plan).into_iter().for_each(|warning| out.warning(warning));
        self.pristine.run(self, plan, out)
    }
}
