//! Resolves a job and its parameters into a plan: evaluates, counts and checks everything.

mod operations;

use super::document::{Field, Job, RawOp, RawPhase, RawRegion, Word};
use super::{JobError, line_and_column, nearest};
use crate::access::derive_seed;
use crate::machine::MachineSpec;
use crate::network_memory::Serving;
use crate::page_size::PageSizeRequest;
use crate::plan::{
    Access, Advice, Backing, ClientKind, JobIdentity, Measure, Mistake, Native, Op, Part, Pattern,
    Phase, Plan, Region, RegionId, Touch,
};
use crate::quantity::{Dimension, Params, evaluate};
use crate::replay::Replay;
use crate::units::{Nanos, UnitError};
use std::ops::Range;
use toml::Spanned;

/// Bounds that keep a mistyped job from exhausting the machine.
const CLIENTS_MAX: u64 = 4096;
const REGIONS_MAX: u64 = 4096;
const REGION_BYTES_MAX: u64 = 1 << 46;
/// The exponents for which the sampler of Zipf's law is accurate.
const THETA_MIN: f64 = 0.01;
const THETA_MAX: f64 = 10.0;

impl Job {
    /// Resolves the job for a machine. `overrides` (from `--set`) take precedence over the machine's
    /// parameters for this job, and these over the job's defaults.
    ///
    /// # Errors
    /// The first error, with its place and a hint.
    pub fn resolve(
        &self,
        overrides: &Params,
        machine: &MachineSpec,
        seed: Option<u64>,
    ) -> Result<Plan, JobError> {
        let params = self.effective_params(overrides, machine)?;
        let job = JobIdentity {
            name: self.name().into(),
            params: params.clone(),
            machine_params: self.params_of(machine, overrides),
            seed: seed.unwrap_or(self.document.seed),
        };
        let mut scope = params;
        scope.insert("memory".into(), machine.memory.0.to_string() + "B");
        scope.insert("page".into(), machine.base_page.bytes().to_string() + "B");
        let mut resolver = Resolver {
            job: self,
            overrides,
            scope,
            seed: job.seed,
            regions: Vec::new(),
            spans: Spans::default(),
        };
        for raw in &self.document.region {
            resolver.region(raw)?;
        }
        let mut phases = Vec::new();
        for (index, raw) in self.document.phase.iter().enumerate() {
            phases.push(resolver.phase(index as u64, raw)?);
        }
        let raw = &self.document.measure;
        let interval = raw.interval.as_ref().map(|f| resolver.time(f)).transpose()?;
        let flip = self.document.native.flip_byte_at.as_ref();
        let native = Native { flip_byte_at: flip.map(|f| resolver.size(f)).transpose()? };
        let regions = std::mem::take(&mut resolver.regions);
        let plan = Plan {
            job,
            regions: regions.into_iter().map(|(_, region)| region).collect(),
            phases,
            measure: Measure { interval, fault_latency: raw.fault_latency },
            native,
        };
        plan.check().map_err(|mistake| resolver.mistake(mistake))?;
        Ok(plan)
    }

    fn effective_params(
        &self,
        overrides: &Params,
        machine: &MachineSpec,
    ) -> Result<Params, JobError> {
        let known = self.params();
        let own = machine.job_params.get(self.name());
        for name in overrides.keys() {
            if !known.contains_key(name) {
                return Err(self.unknown_param(name));
            }
        }
        let mut effective = Params::new();
        for (name, param) in known {
            let given = overrides.get(&name).or_else(|| own.and_then(|own| own.get(&name)));
            let value = match (given, param.values.as_slice()) {
                (Some(given), _) => given.clone(),
                (None, [one]) => one.clone(),
                (None, _) => {
                    return Err(JobError {
                        place: format!("{}: parameter `{name}`", self.place),
                        message: "has several values, which makes a sweep, not one run".into(),
                        remedy: format!(
                            "choose one with --set {name}={}",
                            param.values.join(" or ")
                        ),
                    });
                }
            };
            effective.insert(name, value);
        }
        Ok(effective)
    }

    /// Returns the machine file's parameters that differ from the defaults and that the user does not set.
    fn params_of(&self, machine: &MachineSpec, overrides: &Params) -> Params {
        let known = self.params();
        let is_default = |name: &str, value: &str| {
            known.get(name).is_some_and(|param| param.values.iter().any(|default| default == value))
        };
        let own = machine.job_params.get(self.name()).into_iter().flatten();
        own.filter(|(name, value)| !overrides.contains_key(*name) && !is_default(name, value))
            .map(|(name, value)| (name.clone(), value.clone()))
            .collect()
    }

    fn unknown_param(&self, name: &str) -> JobError {
        let known = self.params();
        let remedy = match nearest(name, known.keys().map(String::as_str)) {
            Some(near) => format!("did you mean `{near}`?"),
            None => format!("`pagetax jobs {}` lists its parameters", self.name()),
        };
        let names: Vec<_> = known.keys().map(String::as_str).collect();
        let message =
            format!("job `{}` has no parameter `{name}`; it has {}", self.name(), names.join(", "));
        JobError { place: format!("--set {name}"), message, remedy }
    }
}

struct Resolver<'a> {
    job: &'a Job,
    /// The values of `--set`.
    overrides: &'a Params,
    scope: Params,
    seed: u64,
    /// Regions with the name of their family.
    regions: Vec<(String, Region)>,
    spans: Spans,
}

/// The places of the plan's parts in the file.
#[derive(Default)]
struct Spans {
    regions: Vec<Range<usize>>,
    phases: Vec<Range<usize>>,
    /// Places of operations, by phase.
    operations: Vec<Vec<Range<usize>>>,
}

type Resolved<T> = Result<T, JobError>;

impl Resolver<'_> {
    fn error(&self, span: Range<usize>, message: String, remedy: impl Into<String>) -> JobError {
        // A value of the command line that the file only refers to is a mistake of the command line.
        let mut given = self.overrides.iter();
        let place = match given.find(|(_, value)| message.contains(&format!("`{value}`"))) {
            Some((name, value)) => format!("--set {name}={value}"),
            None => {
                let (line, column) = line_and_column(&self.job.text, span.start);
                format!("{}:{line}:{column}", self.job.place)
            }
        };
        JobError { place, message, remedy: remedy.into() }
    }

    /// Converts an error of the plan to one with its place in the file.
    fn mistake(&self, mistake: Mistake) -> JobError {
        let Mistake { part, what, remedy } = mistake;
        let span = match part {
            Part::Plan => self.job.document.native.flip_byte_at.as_ref().map(Field::span),
            Part::Region(id) => self.spans.regions.get(id.0).cloned(),
            Part::Phase(phase) => self.spans.phases.get(phase).cloned(),
            Part::Operation(phase, operation) => {
                self.spans.operations.get(phase).and_then(|spans| spans.get(operation).cloned())
            }
        };
        self.error(span.unwrap_or(0..0), what, remedy)
    }

    fn quantity(&self, field: &Field, wanted: Dimension) -> Resolved<f64> {
        let text = field.get_ref().text();
        let fail = |message| {
            let hint = format!("give {}, or set its $parameter so", wanted.describe());
            self.error(field.span(), message, hint)
        };
        let found = evaluate(&text, &self.scope).map_err(|e| fail(e.to_string()))?;
        if found.dimension == wanted {
            return Ok(found.value);
        }
        // Sizes may be plain numbers of bytes.
        if wanted == Dimension::Size && found.dimension == Dimension::Number {
            return Ok(found.value);
        }
        Err(fail(format!("`{text}` is {}", found.dimension.describe())))
    }

    fn size(&self, field: &Field) -> Resolved<u64> {
        self.quantity(field, Dimension::Size).map(|bytes| bytes as u64)
    }

    fn time(&self, field: &Field) -> Resolved<Nanos> {
        self.quantity(field, Dimension::Time).map(|ns| Nanos(ns as u64))
    }

    /// Returns a whole number of at least `min`; rounds fractions down.
    fn count(&self, field: &Field, min: u64, max: u64) -> Resolved<u64> {
        let number = self.quantity(field, Dimension::Number)?.floor();
        if number < min as f64 || number > max as f64 {
            let message = format!("`{}` is {number}", field.get_ref().text());
            return Err(self.error(field.span(), message, format!("keep it from {min} to {max}")));
        }
        Ok(number as u64)
    }

    /// Returns a number from `min` to `max`.
    fn number(&self, field: &Field, min: f64, max: f64) -> Resolved<f64> {
        let number = self.quantity(field, Dimension::Number)?;
        if (min..=max).contains(&number) {
            return Ok(number);
        }
        let message = format!("`{}` is {number}", field.get_ref().text());
        Err(self.error(field.span(), message, format!("keep it from {min} to {max}")))
    }

    /// Returns a rate a second. Events are at least 1 ns and at most a quarter of an hour apart.
    fn rate(&self, field: &Field) -> Resolved<f64> {
        self.number(field, 0.001, 1e9)
    }

    /// Returns a word, or the value of the parameter that it names.
    fn word<'a>(&'a self, word: &'a Word) -> Resolved<&'a str> {
        let text = word.get_ref().as_str();
        let Some(name) = text.strip_prefix('$') else { return Ok(text) };
        self.scope.get(name).map(String::as_str).ok_or_else(|| {
            self.error(
                word.span(),
                format!("`{text}` is no parameter of this job"),
                "declare it in [params]",
            )
        })
    }

    /// Returns the value of one of several known words.
    fn choice<T: Copy>(&self, word: &Word, what: &str, known: &[(&str, T)]) -> Resolved<T> {
        let text = self.word(word)?;
        if let Some((_, value)) = known.iter().find(|(name, _)| *name == text) {
            return Ok(*value);
        }
        let names: Vec<_> = known.iter().map(|(name, _)| *name).collect();
        let message = format!("`{text}` is no {what}");
        let remedy = match nearest(text, names.iter().copied()) {
            Some(near) => format!("did you mean `{near}`? Known: {}", names.join(", ")),
            None => format!("use one of {}", names.join(", ")),
        };
        Err(self.error(word.span(), message, remedy))
    }

    fn region(&mut self, raw: &RawRegion) -> Resolved<()> {
        let name = raw.name.get_ref().clone();
        if self.regions.iter().any(|(family, _)| *family == name) {
            let message = format!("two regions are called `{name}`");
            return Err(self.error(raw.name.span(), message, "give each its own name"));
        }
        let bytes = self.size(&raw.size)?;
        if bytes == 0 || bytes > REGION_BYTES_MAX {
            let what = if bytes == 0 { "would be empty" } else { "would be larger than 64T" };
            let message = format!("region `{name}` {what}");
            return Err(self.error(raw.size.span(), message, "give a size from 1 byte to 64T"));
        }
        let members = match &raw.count {
            Some(count) => self.count(count, 1, REGIONS_MAX)?,
            None => 1,
        };
        let region = Region {
            name: name.clone(),
            backing: self.backing(raw, bytes)?,
            bytes,
            page_size: raw
                .page_size
                .as_ref()
                .map_or(Ok(PageSizeRequest::Default), |w| self.page_size(w))?,
            advice: raw.advice.iter().map(|w| self.advice(w)).collect::<Resolved<_>>()?,
            mapped_at_start: raw.mapped.unwrap_or(raw.count.is_none()),
            place: None,
        };
        let places = raw.places.as_ref().map(|field| self.count(field, 1, REGIONS_MAX));
        let (places, first) = (places.transpose()?, self.regions.len());
        for member in 0..members {
            let mut region = region.clone();
            region.place = places.map(|places| RegionId(first + (member % places) as usize));
            if raw.count.is_some() {
                region.name = format!("{name}[{member}]");
            }
            self.regions.push((name.clone(), region));
            self.spans.regions.push(raw.name.span());
        }
        Ok(())
    }

    fn backing(&self, raw: &RawRegion, bytes: u64) -> Resolved<Backing> {
        let directory = raw.directory.as_ref().map(|w| self.word(w)).transpose()?;
        let file = Backing::File {
            directory: directory.filter(|d| !d.is_empty()).map(String::from),
            private: raw.private.unwrap_or(true),
        };
        let resident = raw.resident.as_ref().map(|f| self.size(f)).transpose()?;
        let serving = raw.serving.as_ref().map(|word| {
            let known = Serving::ALL.map(|serving| (serving.name(), serving));
            self.choice(word, "way of serving", &known)
        });
        let serving = serving.transpose()?.unwrap_or_default();
        let remote = Backing::Remote { resident_bytes: resident.unwrap_or(bytes / 4), serving };
        let Some(word) = &raw.backing else { return Ok(Backing::Anon) };
        let known = [
            ("anon", &Backing::Anon),
            ("shared", &Backing::Shared),
            ("memfd", &Backing::Memfd),
            ("file", &file),
            ("remote", &remote),
        ];
        self.choice(word, "backing", &known).cloned()
    }

    fn page_size(&self, word: &Word) -> Resolved<PageSizeRequest> {
        self.word(word)?.parse().map_err(|error: UnitError| {
            let remedy = "use default, base, a size such as 2M, or hugetlb:2M";
            self.error(word.span(), error.to_string(), remedy)
        })
    }

    fn advice(&self, word: &Word) -> Resolved<Advice> {
        self.choice(word, "advice", ADVICE)
    }

    fn phase(&mut self, index: u64, raw: &RawPhase) -> Resolved<Phase> {
        if raw.ops.is_empty() {
            let message = format!("phase `{}` does nothing", raw.name.get_ref());
            let remedy = "give it ops = [{ touch = \"REGION\" }], or remove it";
            return Err(self.error(raw.name.span(), message, remedy));
        }
        let (client_kind, clients) = match &raw.clients {
            Some(field) => {
                let kind = raw.client_kind.as_ref().map_or(Ok(ClientKind::Processes), |w| {
                    let known =
                        [("processes", ClientKind::Processes), ("threads", ClientKind::Threads)];
                    self.choice(w, "kind of client", &known)
                })?;
                (kind, self.count(field, 1, CLIENTS_MAX)? as u32)
            }
            None => (ClientKind::Main, 1),
        };
        let time = raw.time.as_ref().map(|f| self.time(f)).transpose()?;
        let repeat = match (&raw.repeat, time) {
            (Some(field), _) => self.count(field, 1, u64::MAX / 2)?,
            (None, Some(_)) => u64::MAX,
            (None, None) => 1,
        };
        let (spans, ops) = self.ops(index, raw)?.into_iter().unzip();
        self.spans.operations.push(spans);
        self.spans.phases.push(raw.name.span());
        let switch_rate = raw.switch_rate.as_ref().map(|f| self.rate(f)).transpose()?;
        Ok(Phase {
            name: raw.name.get_ref().clone(),
            client_kind,
            clients,
            repeat,
            time,
            rate: raw.rate.as_ref().map(|f| self.rate(f)).transpose()?,
            parent_wake: switch_rate.map(|rate| Nanos((2e9 / rate) as u64)),
            ops,
        })
    }

    /// Returns the operations of a phase, each with its place in the file. `for_each` repeats them for
    /// each member of a family. `window` undoes the oldest member before a new one would exceed it.
    fn ops(&self, index: u64, raw: &RawPhase) -> Resolved<Vec<(Range<usize>, Op)>> {
        let Some(family) = &raw.for_each else {
            let op = |(i, op): (usize, &Spanned<RawOp>)| {
                let seed = derive_seed(self.seed, index, i as u64, 0);
                Ok((op.span(), self.op(seed, op, None)?))
            };
            return raw.ops.iter().enumerate().map(op).collect();
        };
        let members = self.members(family)?;
        let window = match &raw.window {
            Some(field) => self.count(field, 1, REGIONS_MAX)? as usize,
            None => members.len(),
        };
        let mut ops = Vec::new();
        for (turn, member) in members.iter().enumerate() {
            let at = |region| Some((family.get_ref().as_str(), region));
            if turn >= window {
                for op in &raw.undo {
                    ops.push((op.span(), self.op(0, op, at(members[turn - window]))?));
                }
            }
            for (i, op) in raw.ops.iter().enumerate() {
                let seed = derive_seed(self.seed, index, i as u64, 1 + turn as u64);
                ops.push((op.span(), self.op(seed, op, at(*member))?));
            }
        }
        Ok(ops)
    }

    fn members(&self, family: &Word) -> Resolved<Vec<RegionId>> {
        let found: Vec<_> = (self.regions.iter().enumerate())
            .filter(|(_, (name, _))| name == family.get_ref())
            .map(|(i, _)| RegionId(i))
            .collect();
        if found.is_empty() { Err(self.unknown_region(family)) } else { Ok(found) }
    }

    fn unknown_region(&self, word: &Word) -> JobError {
        let names: Vec<_> = self.regions.iter().map(|(name, _)| name.as_str()).collect();
        let remedy = match nearest(word.get_ref(), names.iter().copied()) {
            Some(near) => format!("did you mean `{near}`?"),
            None => format!("add a [[region]] with name = \"{}\"", word.get_ref()),
        };
        self.error(word.span(), format!("no region is called `{}`", word.get_ref()), remedy)
    }

    /// Returns the region of an operation: the current member if `word` names the family.
    fn target(&self, word: &Word, member: Option<(&str, RegionId)>) -> Resolved<RegionId> {
        if let Some((family, id)) = member
            && family == word.get_ref()
        {
            return Ok(id);
        }
        let members = self.members(word)?;
        match members.as_slice() {
            [one] => Ok(*one),
            _ => {
                let message =
                    format!("`{}` is a family of {} regions", word.get_ref(), members.len());
                Err(self.error(word.span(), message, "say for_each = \"…\" in the phase"))
            }
        }
    }
}

const ADVICE: &[(&str, Advice)] = &[
    ("normal", Advice::Normal),
    ("random", Advice::Random),
    ("sequential", Advice::Sequential),
    ("willneed", Advice::Willneed),
    ("dontneed", Advice::Dontneed),
    ("free", Advice::Free),
    ("cold", Advice::Cold),
    ("pageout", Advice::Pageout),
    ("hugepage", Advice::Hugepage),
    ("nohugepage", Advice::Nohugepage),
    ("collapse", Advice::Collapse),
    ("populate-read", Advice::PopulateRead),
    ("populate-write", Advice::PopulateWrite),
];
