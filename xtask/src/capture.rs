//! `cargo xtask capture`: the README's pictures. A real diagnosis as a terminal shows it, and the published
//! figures of 1990 on the simulated curve; each for light and for dark pages.

use crate::shell;
use anstyle_svg::Term;
use anyhow::{Context, Result, bail};
use plotters::prelude::*;
use serde_json::Value;
use std::path::Path;
use std::process::Command;

const DIRECTORY: &str = "docs/images";
/// The command that the README's picture diagnoses, as a shell reads it.
const DIAGNOSED: &str = "python3 -c 'd = {n: str(n) for n in range(2000000)}; \
                         print(sum(len(d[n * 7919 % 2000000]) for n in range(6000000)))'";
const COLUMNS: &str = "100";
/// The largest size of the curve, in MB: the end of the unpatched table.
const SIZE_MAX: f64 = 32.0;

/// The colours of one kind of page.
struct Theme {
    name: &'static str,
    foreground: (u8, u8, u8),
    background: (u8, u8, u8),
    grid: (u8, u8, u8),
    unpatched: (u8, u8, u8),
    patched: (u8, u8, u8),
}

const THEMES: [Theme; 2] = [
    Theme {
        name: "light",
        foreground: (31, 35, 40),
        background: (255, 255, 255),
        grid: (209, 217, 224),
        unpatched: (207, 34, 46),
        patched: (9, 105, 218),
    },
    Theme {
        name: "dark",
        foreground: (230, 237, 243),
        background: (13, 17, 23),
        grid: (61, 68, 77),
        unpatched: (255, 123, 114),
        patched: (121, 192, 255),
    },
];

pub fn run() -> Result<()> {
    let pagetax = shell::pagetax()?;
    std::fs::create_dir_all(DIRECTORY)?;
    let reproduction = reproduction(&pagetax)?;
    let screen = diagnosis(&pagetax)?;
    for theme in &THEMES {
        write("diagnose", theme, terminal(&screen, theme))?;
        write("vmtest-1990", theme, curves(&reproduction, theme)?)?;
    }
    Ok(())
}

fn write(name: &str, theme: &Theme, svg: String) -> Result<()> {
    let path = Path::new(DIRECTORY).join(format!("{name}-{}.svg", theme.name));
    std::fs::write(&path, svg).with_context(|| format!("cannot write {}", path.display()))?;
    println!("wrote {}", path.display());
    Ok(())
}

/// Returns a terminal's view of a diagnosis: the command line, then its output in colour.
fn diagnosis(pagetax: &str) -> Result<String> {
    // By its name alone, as a user types it, so that the line to paste in the picture is short.
    let directory = std::fs::canonicalize(pagetax)?;
    let directory = directory.parent().context("the binary has no directory")?;
    let path = std::env::var("PATH").unwrap_or_default();
    let mut command = Command::new("sh");
    command.args(["-c", &format!("pagetax diagnose -- {DIAGNOSED}")]);
    command.env("CLICOLOR_FORCE", "1");
    command.env("PATH", format!("{}:{path}", directory.display())).env("COLUMNS", COLUMNS);
    Ok(format!("$ pagetax diagnose -- {DIAGNOSED}\n{}", shell::output(&mut command)?))
}

fn terminal(screen: &str, theme: &Theme) -> String {
    let color = |(red, green, blue)| anstyle::RgbColor(red, green, blue).into();
    Term::new()
        .fg_color(color(theme.foreground))
        .bg_color(color(theme.background))
        .render_svg(screen)
}

/// Returns the comparison with the tables of 1990. The command fails where it misses a figure: that is
/// part of the picture.
fn reproduction(pagetax: &str) -> Result<Value> {
    let output = Command::new(pagetax).args(["reproduce", "sun-4", "--json"]).output()?;
    serde_json::from_slice(&output.stdout)
        .with_context(|| format!("`{pagetax} reproduce sun-4 --json` printed no document"))
}

/// One size of the sweep: megabytes, published seconds, simulated seconds (low, median, high).
struct Point {
    size: f64,
    published: f64,
    simulated: [f64; 3],
}

fn points(reproduction: &Value, figure: &str) -> Result<Vec<Point>> {
    let rows = reproduction["tables"][0]["rows"].as_array().context("no rows of sun-4")?;
    let point = |row: &Value| {
        let simulated = &row["simulated"];
        Some(Point {
            size: row["key"]["virtual_mb"].as_f64()?,
            published: row["published"].as_f64()?,
            simulated: [
                simulated["low"].as_f64()?,
                simulated["median"].as_f64()?,
                simulated["high"].as_f64()?,
            ],
        })
    };
    let mut found: Vec<Point> = Vec::new();
    for point in rows.iter().filter(|row| row["figure"] == figure).filter_map(point) {
        // The SPARCstation 1+ comes later in the document, with sizes that the 1 has too.
        if point.size <= SIZE_MAX && found.last().is_none_or(|last| last.size < point.size) {
            found.push(point);
        }
    }
    if found.is_empty() {
        bail!("no rows of `{figure}` in the tables of sun-4");
    }
    Ok(found)
}

/// Draws elapsed time over size: a band and a line for the simulated machine, circles for the report.
fn curves(reproduction: &Value, theme: &Theme) -> Result<String> {
    let color = |(red, green, blue): (u8, u8, u8)| RGBColor(red, green, blue);
    let mut svg = String::new();
    {
        let root = SVGBackend::with_string(&mut svg, (760, 400)).into_drawing_area();
        root.fill(&color(theme.background))?;
        let text = |size: u32| ("sans-serif", size).into_font().color(&color(theme.foreground));
        let mut chart = ChartBuilder::on(&root)
            .caption("vmtest on a SPARCstation 1, 1990: seconds by size", text(18))
            .margin(12)
            .x_label_area_size(40)
            .y_label_area_size(56)
            .build_cartesian_2d(0.0..SIZE_MAX + 1.0, (2.0..4000.0).log_scale())?;
        chart
            .configure_mesh()
            .disable_x_mesh()
            .bold_line_style(color(theme.grid))
            .light_line_style(color(theme.background))
            .axis_style(color(theme.foreground))
            .label_style(text(14))
            .x_label_formatter(&|size| format!("{size:.0}"))
            .y_label_formatter(&|seconds| format!("{seconds:.0}"))
            .x_desc("active virtual memory, MB")
            .y_desc("elapsed seconds")
            .draw()?;
        let series = [
            ("SunOS 4.0.3", "elapsed_s", theme.unpatched),
            ("with Sun's pmeg patch", "new_elapsed_s", theme.patched),
        ];
        for (label, figure, rgb) in series {
            let (points, style) = (points(reproduction, figure)?, color(rgb));
            let low = points.iter().map(|p| (p.size, p.simulated[0]));
            let high = points.iter().rev().map(|p| (p.size, p.simulated[2]));
            chart.draw_series([Polygon::new(
                low.chain(high).collect::<Vec<_>>(),
                style.mix(0.25),
            )])?;
            let medians = points.iter().map(|p| (p.size, p.simulated[1]));
            chart
                .draw_series(LineSeries::new(medians, style.stroke_width(2)))?
                .label(format!("{label}: simulated (median, band of seeds)"))
                .legend(move |(x, y)| {
                    PathElement::new([(x, y), (x + 20, y)], style.stroke_width(2))
                });
            let published = points.iter().map(|p| Circle::new((p.size, p.published), 4, style));
            chart
                .draw_series(published)?
                .label(format!("{label}: published"))
                .legend(move |(x, y)| Circle::new((x + 10, y), 4, style));
        }
        chart
            .configure_series_labels()
            .position(SeriesLabelPosition::UpperLeft)
            .margin(8)
            .border_style(color(theme.grid))
            .background_style(color(theme.background))
            .label_font(text(14))
            .draw()?;
        root.present()?;
    }
    Ok(svg)
}
