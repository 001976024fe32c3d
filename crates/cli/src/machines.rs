use anyhow::Result;
use pagetax_core::machine::*;
use pagetax_core::units::*;
pub fn open(name: &str) -> Result<Box<dyn Machine>> {
    Ok(Box::new(Fake(name.into())))
}
struct Fake(String);
impl Machine for Fake {
    fn spec(&self) -> MachineSpec {
        MachineSpec {
            name: self.0.clone(),
            kind: MachineKind::Null,
            validated: true,
            memory: Bytes(1 << 30),
            base_page: PageSize::K4,
            page_sizes: vec![],
            cpus: 1,
            job_params: Default::default(),
        }
    }
    fn check(&self, _: &pagetax_core::plan::Plan) -> Vec<Unmet> {
        vec![]
    }
    fn run(&mut self, _p: &pagetax_core::plan::Plan, out: &mut dyn Sink) -> Result<(), RunError> {
        for i in 0..20 {
            std::thread::sleep(std::time::Duration::from_millis(400));
            out.progress(i as f64 / 20.0);
        }
        Ok(())
    }
}
