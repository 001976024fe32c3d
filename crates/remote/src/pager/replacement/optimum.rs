//! The optimum of demand paging: the page whose next use is furthest away leaves (Belady 1966).

use super::references::{References, Step};
use super::{PolicyCounts, SinglePages};
use std::collections::BinaryHeap;

/// The next use of a page that is not used again.
const NEVER: u32 = u32::MAX;
/// The next use of a page that is not resident.
const GONE: u32 = u32::MAX - 1;

/// Returns for each step when its page is accessed next. A page that is dropped before that is not needed.
fn next_uses(references: &References) -> Vec<u32> {
    let mut next = vec![NEVER; references.pages()];
    let mut at = references.step_count() as u32;
    let mut of = |step| {
        at -= 1;
        match step {
            Step::Access(page, _) => std::mem::replace(&mut next[page as usize], at),
            Step::Unmap(page) => std::mem::replace(&mut next[page as usize], NEVER),
            Step::Zeros(page) => next[page as usize],
        }
    };
    let mut uses: Vec<u32> = references.steps().rev().map(&mut of).collect();
    uses.reverse();
    uses
}

/// Returns the counts of the optimum.
pub(super) fn counts(references: &References, limit: usize) -> PolicyCounts {
    let mut pages = SinglePages::new(references.pages());
    // The next use of each resident page. The heap also has uses that are over, or of pages that left.
    let (mut next_of, mut resident) = (vec![GONE; references.pages()], 0);
    let mut furthest = BinaryHeap::new();
    for (step, next) in references.steps().zip(next_uses(references)) {
        let (page, is_write) = match step {
            Step::Access(page, is_write) => (page, is_write),
            Step::Unmap(page) => {
                resident -= usize::from(next_of[page as usize] != GONE);
                next_of[page as usize] = GONE;
                pages.forget(page);
                continue;
            }
            Step::Zeros(page) => {
                pages.zeros(page);
                continue;
            }
        };
        let is_resident = next_of[page as usize] != GONE;
        pages.note(page, is_write, is_resident);
        if !is_resident {
            while resident >= limit {
                let Some((use_at, victim)) = furthest.pop() else { break };
                if next_of[victim as usize] == use_at {
                    next_of[victim as usize] = GONE;
                    pages.evict(victim);
                    resident -= 1;
                }
            }
            resident += 1;
        }
        next_of[page as usize] = next;
        furthest.push((next, page));
    }
    pages.counts
}
