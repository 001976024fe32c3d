//! trapstat -t, trapstat -T and pmap -sx, with the columns of McDougall, 'Taming Your Emu' (Sun
//! BluePrints, 2004).
//!
//! Invariant: rates are per second of the interval; time is misses × the handler's time. Values
//! that the model does not predict are transcribed from the report, for the report's own job only.
//! The last column of each row names its source.

use super::anon::{AddressSpace, Placed};
use crate::model::{Model, ModelError};
use pagetax_core::counter::Provenance;
use pagetax_core::plan::RegionId;
use pagetax_core::report::{Table, Warning};
use pagetax_core::units::PageSize;
use std::collections::BTreeMap;

/// TLB misses per second outside the job: of the kernel, and of user code that is not modelled.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Background {
    user: Rates,
    kernel: Rates,
}

/// Misses per second in one mode.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Rates {
    /// Instruction fetches that missed the TLB.
    pub itlb: u64,
    /// Instruction fetches that also missed the translation storage buffer (TSB).
    pub itsb: u64,
    /// Loads and stores that missed the TLB.
    pub dtlb: u64,
    /// Loads and stores that also missed the TSB.
    pub dtsb: u64,
}

impl Rates {
    fn plus(self, other: Rates) -> Rates {
        Rates {
            itlb: self.itlb + other.itlb,
            itsb: self.itsb + other.itsb,
            dtlb: self.dtlb + other.dtlb,
            dtsb: self.dtsb + other.dtsb,
        }
    }
}

impl Background {
    /// Reads table `[background]`.
    ///
    /// # Errors
    /// Returns an error if a constant is absent.
    pub fn load(model: &Model) -> Result<Self, ModelError> {
        let rate = |key| model.count("background", key);
        let user = Rates { itlb: rate("user_itlb")?, dtlb: rate("user_dtlb")?, ..Rates::default() };
        let kernel = Rates {
            itlb: rate("kernel_itlb")?,
            itsb: 0,
            dtlb: rate("kernel_dtlb")?,
            dtsb: rate("kernel_dtsb")?,
        };
        Ok(Background { user, kernel })
    }

    /// Returns the kernel's miss rates, all on base pages.
    pub fn kernel(&self) -> Rates {
        self.kernel
    }

    /// Returns a warning that names the transcribed parts of the tables.
    pub fn warning(&self) -> Warning {
        Warning {
            id: "assumed_background".into(),
            text: format!(
                "transcribed from McDougall (2004), not modeled and not in the budget: trapstat's kernel rows, {} \
                 itlb and {} dtlb misses a second of its user rows on 8k pages, and pmap's rows of \
                 program, libraries and stack",
                self.user.itlb, self.user.dtlb
            ),
            remedy: String::new(),
        }
    }
}

/// Miss counts over an interval.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Interval {
    /// Length of the interval in nanoseconds.
    pub elapsed_ns: u64,
    /// Handler time of one TLB miss, in picoseconds.
    pub handler_ps: u64,
    /// Data misses by page size, smallest first.
    pub data_misses: Vec<(PageSize, u64)>,
    /// Instruction misses, all on base pages.
    pub instruction_misses: u64,
    /// Data misses that also missed the TSB, all counted on base pages.
    pub tsb_misses: u64,
}

impl Interval {
    fn per_second(&self, count: u64) -> u64 {
        let elapsed_ns = u128::from(self.elapsed_ns.max(1));
        ((u128::from(count) * 1_000_000_000 + elapsed_ns / 2) / elapsed_ns) as u64
    }

    /// Computes the rates of one page size in user mode; `nth` 0 is the base page.
    fn user(&self, nth: usize, misses: u64, background: Option<&Background>) -> Rates {
        let own = Rates { dtlb: self.per_second(misses), ..Rates::default() };
        if nth > 0 {
            return own;
        }
        let (itlb, dtsb) =
            (self.per_second(self.instruction_misses), self.per_second(self.tsb_misses));
        let background = background.map_or(Rates::default(), |background| background.user);
        own.plus(Rates { itlb, dtsb, ..Rates::default() }).plus(background)
    }

    /// Formats the cells at the end of each row: each rate with its time in percent, then the
    /// total.
    fn cells(&self, rates: Rates) -> Vec<String> {
        // Handler time is counted once, with the TLB miss that caused it.
        let percent = |rate: u64| (rate * self.handler_ps) as f64 / 1e10;
        let text = |percent: f64| format!("{:.1}", percent.min(99.9));
        let (itlb, dtlb) = (percent(rates.itlb), percent(rates.dtlb));
        vec![
            rates.itlb.to_string(),
            text(itlb),
            rates.itsb.to_string(),
            text(0.0),
            rates.dtlb.to_string(),
            text(dtlb),
            rates.dtsb.to_string(),
            text(0.0),
            text(itlb + dtlb),
        ]
    }
}

const COUNTED: [&str; 9] =
    ["itlb-miss", "%tim", "itsb-miss", "%tim", "dtlb-miss", "%tim", "dtsb-miss", "%tim", "%tim"];

/// Formats a page size as trapstat does: `8k`, `64k`, `512k`, `4m`.
fn size_name(size: PageSize) -> String {
    size.to_string().to_lowercase()
}

/// The values of the tables' source column.
const MODELED: &str = "modeled";
const TRANSCRIBED: &str = "transcribed";
const BOTH: &str = "modeled, transcribed";

/// Returns both tables. Without a background, the kernel's rows are "not modeled".
pub fn trapstat(interval: &Interval, background: Option<&Background>) -> Vec<Table> {
    let sizes = || interval.data_misses.iter().map(|(size, _)| size_name(*size)).enumerate();
    let users = interval.data_misses.iter().enumerate();
    let users: Vec<Rates> =
        users.map(|(nth, (_, misses))| interval.user(nth, *misses, background)).collect();
    let user = users.iter().fold(Rates::default(), |sum, rates| sum.plus(*rates));
    let cells = |rates: Option<Rates>| match rates {
        Some(rates) => interval.cells(rates),
        None => vec!["-".into(); COUNTED.len()],
    };
    let row = |head: &[&str], rates: Option<Rates>, source: &str| -> Vec<String> {
        let head = head.iter().map(|text| text.to_string());
        head.chain(cells(rates)).chain([source.to_string()]).collect()
    };
    let mixed = if background.is_some() { BOTH } else { MODELED };
    let of_kernel = if background.is_some() { TRANSCRIBED } else { "not modeled" };
    let kernel = background.map(|background| background.kernel);
    let total = user.plus(kernel.unwrap_or_default());
    let brief = vec![
        row(&["0", "u"], Some(user), mixed),
        row(&["0", "k"], kernel, of_kernel),
        row(&["", "ttl"], Some(total), mixed),
    ];
    let of_size = |nth: usize, rest: &'static str| if nth == 0 { mixed } else { rest };
    let user_rows =
        sizes().map(|(nth, size)| row(&["0", "u", &size], Some(users[nth]), of_size(nth, MODELED)));
    let kernel_rows = sizes().map(|(nth, size)| {
        let rates = kernel.map(|kernel| if nth == 0 { kernel } else { Rates::default() });
        row(&["0", "k", &size], rates, of_kernel)
    });
    let mut full: Vec<_> = user_rows.chain(kernel_rows).collect();
    full.push(row(&["", "ttl", ""], Some(total), mixed));
    let table = |title: &str, head: &[&str], rows| Table {
        title: title.into(),
        columns: head.iter().chain(&COUNTED).chain(&["source"]).map(|t| t.to_string()).collect(),
        rows,
        provenance: Provenance::Modeled,
    };
    vec![
        table("trapstat -t", &["cpu", "m"], brief),
        table("trapstat -T", &["cpu", "m", "size"], full),
    ]
}

/// A row of the pmap listing.
struct Listed {
    address: u64,
    kbytes: u64,
    resident_kbytes: u64,
    anon: bool,
    locked_kbytes: u64,
    page: Option<String>,
    mode: &'static str,
    name: &'static str,
    source: &'static str,
}

/// The parts of the test program's image outside the heap, from the report. The fields are address,
/// kbytes, resident kbytes, anonymous, page size known, mode and file.
const IMAGE: &[(u64, u64, u64, bool, bool, &str, &str)] = &[
    (0x0001_0000, 8, 8, false, true, "r-x--", "dev:277,83 ino:114875"),
    (0x0002_0000, 8, 8, true, true, "rwx--", "dev:277,83 ino:114875"),
    (0xff28_0000, 120, 120, false, true, "r-x--", "libc.so.1"),
    (0xff29_e000, 136, 128, false, false, "r-x--", "libc.so.1"),
    (0xff2c_0000, 72, 72, false, true, "r-x--", "libc.so.1"),
    (0xff2d_2000, 192, 192, false, false, "r-x--", "libc.so.1"),
    (0xff30_2000, 112, 112, false, true, "r-x--", "libc.so.1"),
    (0xff31_e000, 48, 32, false, false, "r-x--", "libc.so.1"),
    (0xff33_a000, 24, 24, true, true, "rwx--", "libc.so.1"),
    (0xff34_0000, 8, 8, true, true, "rwx--", "libc.so.1"),
    (0xff39_0000, 8, 8, false, true, "r-x--", "libc_psr.so.1"),
    (0xff3a_0000, 8, 8, false, true, "r-x--", "libdl.so.1"),
    (0xff3b_0000, 8, 8, true, true, "rwx--", "[ anon ]"),
    (0xff3c_0000, 152, 152, false, true, "r-x--", "ld.so.1"),
    (0xff3f_6000, 8, 8, true, true, "rwx--", "ld.so.1"),
    (0xffbf_a000, 24, 24, true, true, "rwx--", "[ stack ]"),
];

/// Returns one row for each contiguous run of one page size. If `is_listed`, it adds the report's
/// rows for the rest of its program.
pub fn pmap(space: &AddressSpace, placed: &BTreeMap<RegionId, Placed>, is_listed: bool) -> Table {
    let image = IMAGE.iter().filter(|_| is_listed);
    let mut listed: Vec<Listed> = image
        .map(|(address, kbytes, resident, anon, known, mode, name)| Listed {
            address: *address,
            kbytes: *kbytes,
            resident_kbytes: *resident,
            anon: *anon,
            locked_kbytes: 0,
            page: known.then(|| "8K".into()),
            mode,
            name,
            source: TRANSCRIBED,
        })
        .collect();
    let heap = placed.values().map(|placed| placed.base).find(|base| *base == super::solaris::HEAP);
    for area in space.areas.values() {
        let name = if heap == Some(area.placed.base) { "[ heap ]" } else { "[ anon ]" };
        listed.extend(runs(space, area.placed, area.locked_bytes, name));
    }
    listed.sort_by_key(|row| row.address);
    let number = |kbytes: u64| if kbytes == 0 { "-".into() } else { kbytes.to_string() };
    let mut rows: Vec<Vec<String>> = listed
        .iter()
        .map(|row| {
            vec![
                format!("{:08X}", row.address),
                row.kbytes.to_string(),
                number(row.resident_kbytes),
                number(if row.anon { row.resident_kbytes } else { 0 }),
                number(row.locked_kbytes),
                row.page.clone().unwrap_or("-".into()),
                row.mode.into(),
                row.name.into(),
                row.source.into(),
            ]
        })
        .collect();
    let sum = |of: fn(&Listed) -> u64| number(listed.iter().map(of).sum());
    rows.push(vec![
        "total Kb".into(),
        sum(|row| row.kbytes),
        sum(|row| row.resident_kbytes),
        sum(|row| if row.anon { row.resident_kbytes } else { 0 }),
        sum(|row| row.locked_kbytes),
        String::new(),
        String::new(),
        String::new(),
        if is_listed { BOTH } else { MODELED }.into(),
    ]);
    let columns =
        ["Address", "Kbytes", "RSS", "Anon", "Locked", "Pgsz", "Mode", "Mapped File", "source"];
    Table {
        title: "pmap -sx".into(),
        columns: columns.map(String::from).to_vec(),
        rows,
        provenance: Provenance::Modeled,
    }
}

/// Splits an area into runs of one page size, or of nothing resident.
fn runs(
    space: &AddressSpace,
    placed: Placed,
    locked_bytes: u64,
    name: &'static str,
) -> Vec<Listed> {
    let end = placed.base + placed.bytes;
    let mut runs: Vec<(u64, u64, Option<PageSize>)> = Vec::new();
    let mut add = |from: u64, to: u64, size: Option<PageSize>| match runs.last_mut() {
        Some(last) if last.2 == size => last.1 = to,
        _ => runs.push((from, to, size)),
    };
    let mut at = placed.base;
    for (start, page) in space.pages.range(placed.base..end) {
        if *start > at {
            add(at, *start, None);
        }
        at = start + page.size.bytes();
        add(*start, at, Some(page.size));
    }
    if at < end {
        add(at, end, None);
    }
    let locked_end = placed.base + locked_bytes;
    let listed = |(from, to, size): (u64, u64, Option<PageSize>)| Listed {
        address: from,
        kbytes: (to - from) >> 10,
        resident_kbytes: if size.is_some() { (to - from) >> 10 } else { 0 },
        anon: true,
        locked_kbytes: locked_end.clamp(from, to).saturating_sub(from) >> 10,
        page: size.map(|size| size.to_string()),
        mode: "rwx--",
        name,
        source: MODELED,
    };
    runs.into_iter().map(listed).collect()
}
