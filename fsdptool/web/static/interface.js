"use strict";
// What htmx needs of this page: the token of writes, a name for this tab, and addresses without empty fields.
(function () {
  const token = document.querySelector('meta[name="write-token"]').content;
  let tab = sessionStorage.getItem("fsdptool-tab");
  if (!tab) {
    tab = Array.from(crypto.getRandomValues(new Uint8Array(12)), (byte) => byte.toString(16).padStart(2, "0")).join("");
    sessionStorage.setItem("fsdptool-tab", tab);
  }
  document.addEventListener("htmx:configRequest", (event) => {
    const detail = event.detail;
    detail.headers["X-Fsdptool-Tab"] = tab;
    if (detail.verb !== "get") {
      detail.headers["X-Fsdptool-Token"] = token;
      return;
    }
    for (const name of new Set(detail.formData.keys())) {
      const values = detail.formData.getAll(name).filter((value) => value !== "");
      detail.formData.delete(name);
      for (const value of values) detail.formData.append(name, value);
    }
  });
  // An error page is shown like any other answer; htmx alone would drop it.
  document.addEventListener("htmx:beforeSwap", (event) => {
    if (event.detail.xhr.status >= 400 && event.detail.xhr.getResponseHeader("content-type")?.startsWith("text/html")) {
      event.detail.shouldSwap = true;
      event.detail.isError = false;
    }
  });

  // A server that has ended, or was started again, must not look as if nothing had changed.
  const notice = document.getElementById("disconnected");
  const ended = "The server does not answer, so this page may be out of date. If it has ended, start fsdptool ui again and open the address that it prints.";
  const restarted = "The server was started again. Open the address that fsdptool ui has printed in its terminal.";
  let waiting = null;
  function say(text) {
    clearTimeout(waiting);
    waiting = null;
    if (notice.textContent !== text) notice.textContent = text;
  }
  document.addEventListener("htmx:sendError", () => say(ended));
  document.addEventListener("htmx:responseError", (event) => { if (event.detail.xhr.status === 401) say(restarted); });
  // A stream that breaks off is opened again at once; only one that stays away counts.
  document.addEventListener("htmx:sseError", () => { waiting ??= setTimeout(() => say(ended), 3000); });
  for (const name of ["htmx:sseOpen", "htmx:sseClose", "htmx:afterOnLoad"]) {
    document.addEventListener(name, (event) => { if (!(event.detail.xhr?.status === 401)) say(""); });
  }

  // Controls stand beside the answer where there is room, and are folded above it where there is none.
  const controls = document.getElementById("controls");
  const narrow = matchMedia("(max-width: 60rem)");
  if (controls && !narrow.matches) controls.open = true;
  narrow.addEventListener("change", () => { if (controls && !narrow.matches) controls.open = true; });
  document.addEventListener("submit", (event) => {
    if (!controls || !narrow.matches || !controls.contains(event.target)) return;
    controls.open = false;
    document.getElementById("answer").scrollIntoView();
  });

  // A control outside of its form changes the form, too.
  document.addEventListener("change", (event) => {
    const form = event.target.form;
    if (form && !form.contains(event.target)) form.dispatchEvent(new Event("change"));
  });
  // A file that is dropped on a form is its upload.
  for (const form of document.querySelectorAll("form[data-drop]")) {
    const input = form.querySelector('input[type="file"]');
    for (const name of ["dragenter", "dragover"]) {
      form.addEventListener(name, (event) => { event.preventDefault(); form.classList.add("over"); });
    }
    form.addEventListener("dragleave", () => form.classList.remove("over"));
    form.addEventListener("drop", (event) => {
      event.preventDefault();
      form.classList.remove("over");
      if (event.dataTransfer.files.length) {
        input.files = event.dataTransfer.files;
        form.requestSubmit();
      }
    });
  }
  // Sliders beside number fields that have steps.
  function addSliders() {
    for (const field of document.querySelectorAll("input[data-steps]:not([data-slider])")) {
      const steps = field.dataset.steps.split(",").map(Number);
      const slider = document.createElement("input");
      slider.type = "range";
      slider.min = 0;
      slider.max = steps.length - 1;
      slider.setAttribute("aria-label", document.querySelector(`label[for="${field.id}"]`).textContent + ", slider");
      const show = () => {
        const value = Number(field.value || field.placeholder || steps[0]);
        let nearest = 0;
        steps.forEach((step, index) => {
          if (Math.abs(Math.log(step / value)) < Math.abs(Math.log(steps[nearest] / value))) nearest = index;
        });
        slider.value = nearest;
        slider.setAttribute("aria-valuetext", field.value || "not given");
      };
      show();
      slider.addEventListener("input", (event) => {
        event.stopPropagation();
        field.value = steps[slider.value];
        slider.setAttribute("aria-valuetext", field.value);
      });
      field.addEventListener("input", show);
      field.dataset.slider = "yes";
      field.after(slider);
    }
  }
  // The cursor over a timeline: what is alive at the moment under it.
  function element(name, text, className) {
    const made = document.createElement(name);
    if (text !== undefined) made.textContent = text;
    if (className) made.className = className;
    return made;
  }
  function addCursors() {
    for (const panel of document.querySelectorAll(".moment[data-moments]")) {
      const moments = JSON.parse(panel.dataset.moments);
      panel.removeAttribute("data-moments");
      panel.hidden = false;
      const slider = panel.querySelector("input");
      const list = panel.querySelector(".alive");
      const charts = [...panel.parentElement.querySelectorAll("svg[class^=timeline]")];
      const columns = charts.map((chart) => [...chart.querySelectorAll("rect.hover")]);
      const lines = charts.map((chart, number) => {
        const line = document.createElementNS("http://www.w3.org/2000/svg", "line");
        line.setAttribute("class", "cursor");
        for (const [name, from] of [["y1", "y"], ["y2", "y"]]) line.setAttribute(name, columns[number][0].getAttribute(from));
        line.setAttribute("y2", Number(columns[number][0].getAttribute("y")) + Number(columns[number][0].getAttribute("height")));
        chart.insertBefore(line, columns[number][0]);
        return line;
      });
      const show = (index) => {
        const [name, total, holdings] = moments[index];
        slider.value = index;
        slider.setAttribute("aria-valuetext", `${name}, ${total}`);
        lines.forEach((line, number) => {
          const column = columns[number][index];
          const x = Number(column.getAttribute("x")) + Number(column.getAttribute("width")) / 2;
          line.setAttribute("x1", x);
          line.setAttribute("x2", x);
        });
        list.replaceChildren(element("p", `${name}: ${total}`, "strong"));
        const items = element("ul", undefined, "key");
        for (const [group, what, size] of holdings) {
          const item = element("li");
          item.append(element("span", undefined, `swatch k-${group}`), `${what} ${size}`);
          items.append(item);
        }
        list.append(items);
      };
      slider.addEventListener("input", () => show(Number(slider.value)));
      slider.addEventListener("change", (event) => event.stopPropagation());
      columns.forEach((rects) => rects.forEach((rect, index) => rect.addEventListener("pointerenter", () => show(index))));
      // What is below stays where it is: the list has the height of the longest one from the start.
      const lengths = moments.map(([, , holdings]) => holdings.length);
      const start = Number(slider.value);
      show(lengths.indexOf(Math.max(...lengths)));
      panel.style.minHeight = `${panel.offsetHeight}px`;
      show(start);
    }
  }
  function enhance() {
    addSliders();
    addCursors();
  }
  enhance();
  document.addEventListener("htmx:afterSettle", enhance);
})();
